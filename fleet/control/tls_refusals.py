"""TLS failures of a connection to Redis that waiting does not cure, such as a refused certificate
or a missing file. Connects to nothing.
"""

import socket
import ssl
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

FILES = "a file after the `?` (ssl_ca_certs, ssl_certfile, ssl_keyfile)"
OTHER_NAME, EXPIRED, NOT_YET_VALID = (62, 63, 64), 10, 9
"""Codes of X509_V_ERR in OpenSSL's x509_vfy.h: host name, e-mail and IP address mismatch; expired;
not yet valid.
"""


def tls_refusal(url: str, error: BaseException) -> str:
    """Return the cause and the remedy of a TLS failure; "" for another failure, and for an address
    without TLS.
    """
    parts = urlsplit(url)
    if not parts.scheme.startswith("rediss"):
        return ""
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError():
                return (
                    "REDIS_URL: the certificate of Redis is refused "
                    f"({cause.verify_message}): {_remedy(cause.verify_code)}"
                )
            case ssl.SSLError(reason="KEY_VALUES_MISMATCH"):
                return (
                    "REDIS_URL: ssl_keyfile is not the key of ssl_certfile; name the key "
                    "that it was made with"
                )
            case ssl.SSLError(reason=str(reason)) if (
                "NO_START_LINE" in reason or "NO_CERTIFICATE" in reason
            ):
                return f"REDIS_URL: {FILES} is not PEM; convert it"
            case FileNotFoundError() | PermissionError():
                return f"REDIS_URL: {FILES} cannot be read ({cause.strerror}); correct its path"
            case _:
                continue
    return ""


def client_certificate_hint(url: str, error: BaseException) -> str:
    """Return a hint for the end of an error message if a TLS connection to Redis failed after it
    was opened, and `url` names no client certificate; else "".

    A server that restarts closes connections too, so `tls_refusal` does not report this failure.
    """
    parts = urlsplit(url)
    unopened = any(
        isinstance(cause, ConnectionRefusedError | socket.gaierror | TimeoutError)
        for cause in _causes(error)
    )
    if unopened or not parts.scheme.startswith("rediss") or "ssl_certfile" in parse_qs(parts.query):
        return ""
    return (
        "; if Redis requires certificates of clients (tls-auth-clients yes), add "
        "ssl_certfile=FILE&ssl_keyfile=FILE after the `?`"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _remedy(code: int) -> str:
    if code in OTHER_NAME:
        return (
            "write the address with a name that is in the certificate, or have one issued "
            "for this name"
        )
    if code == EXPIRED:
        return "renew it, and restart Redis"
    if code == NOT_YET_VALID:
        return "correct this host's clock"
    return "name the authority that signed it: add ?ssl_ca_certs=FILE, its certificate in PEM"
