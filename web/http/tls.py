"""The gateway's certificate, from the configuration or self-signed in the data folder, and new
certificates for chosen hosts. Knows no route.
"""

import contextlib
import datetime as dt
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleet.config.schema import FleetConfig
from fleet.core.errors import BadInput, ConfigError
from fleet.process.private import make_private_folder, write_private

VALID = dt.timedelta(days=365)
RENEW = dt.timedelta(days=30)
"""Remaining validity below which the self-signed certificate is replaced at the next start."""
CERT_NAME, KEY_NAME = "cert.pem", "key.pem"
_DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    cert: Path
    key: Path


def tls_files(config: FleetConfig) -> TlsFiles | None:
    """Return the certificate and key files, or None for plain HTTP. Raises: ConfigError naming a
    missing file.
    """
    web = config.web
    if web.tls_cert is not None and web.tls_key is not None:
        for name, path in (("web.tls_cert", web.tls_cert), ("web.tls_key", web.tls_key)):
            if not path.is_file():
                raise ConfigError(f"{name}: there is no file {path}", param=name)
        return TlsFiles(cert=web.tls_cert, key=web.tls_key)
    return _self_signed(config.data_dir / "tls", web.host) if web.tls is not None else None


def _self_signed(folder: Path, host: str) -> TlsFiles:
    """Return the stored self-signed certificate. If there is none, if it expires soon or if it
    lacks a name of this machine, create another certificate for this machine's names and addresses,
    and for `host` if it is an address. Browsers ask for consent to each new certificate.
    """
    files = TlsFiles(cert=folder / CERT_NAME, key=folder / KEY_NAME)
    names = _names(own_hosts(host))
    if not (files.key.is_file() and _is_valid_for(files.cert, names)):
        make_private_folder(folder.parent)
        make_private_folder(folder)
        _create_certificate(files, names)
    return files


def create_certificate(folder: Path, hosts: Sequence[str], valid: dt.timedelta = VALID) -> TlsFiles:
    """Write a new self-signed certificate and its private key into a folder, which is created if it
    is missing. `hosts` are names and addresses under which clients reach the gateway.

    Raises: BadInput for a host that no certificate can have; ConfigError if a file exists; OSError.
    """
    files = TlsFiles(cert=folder / CERT_NAME, key=folder / KEY_NAME)
    for path in (files.cert, files.key):
        if path.exists():
            raise ConfigError(f"{path} exists; remove it, or write into another folder")
    names = _names(hosts)
    folder.mkdir(parents=True, exist_ok=True)
    _create_certificate(files, names, valid)
    return files


def own_hosts(*further: str) -> list[str]:
    """Return the names and addresses of this machine, and the `further` ones that are addresses."""
    hosts = sorted(filter(_DNS_NAME.fullmatch, {"localhost", socket.gethostname()}))
    cards = psutil.net_if_addrs().values()
    own = {address.address.partition("%")[0] for of_card in cards for address in of_card}
    return [*hosts, *sorted(filter(_is_address, own | {"127.0.0.1", "::1", *further}))]


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    return [
        x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else _dns_name(host)
        for host in hosts
    ]


def _dns_name(host: str) -> x509.DNSName:
    try:
        name = host.encode("idna").decode()
    except UnicodeError:
        name = ""
    if not _DNS_NAME.fullmatch(name):
        raise BadInput(f"{host!r} is no host name or address; leave out scheme, port and path")
    return x509.DNSName(name)


def _is_valid_for(cert: Path, names: list[x509.GeneralName]) -> bool:
    try:
        known = x509.load_pem_x509_certificate(cert.read_bytes())
        held = known.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    return set(names) <= set(held) and known.not_valid_after_utc - dt.datetime.now(dt.UTC) > RENEW


def _create_certificate(
    files: TlsFiles, names: list[x509.GeneralName], valid: dt.timedelta = VALID
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fleet gateway")])
    now = dt.datetime.now(dt.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(files.key, pem.decode())
    write_private(files.cert, cert.public_bytes(serialization.Encoding.PEM).decode())
