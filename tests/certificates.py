"""A test certificate authority and the certificates that it signs, as PEM files."""

import datetime as dt
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


class Authority:
    """A certificate authority for tests, which writes `ca.crt` into a folder, and `NAME.crt` and
    `NAME.key` for each certificate it issues. Validity begins ten days ago.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("authority")
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        own = self._builder("authority", self._key, 90 * DAY).add_extension(
            constraints, critical=True
        )
        self._write("ca.crt", own.sign(self._key, hashes.SHA256()))

    def issue(
        self, name: str, valid_for: dt.timedelta, host: str = "localhost"
    ) -> tuple[Path, Path]:
        """Write a certificate for `host`; return the paths of the certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = x509.SubjectAlternativeName([x509.DNSName(host)])
        certificate = (
            self._builder(name, key, valid_for)
            .add_extension(hosts, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        secret = self._folder / f"{name}.key"
        form = serialization.PrivateFormat.PKCS8
        secret.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        )
        return self._write(f"{name}.crt", certificate), secret

    def _builder(
        self, name: str, key: ec.EllipticCurvePrivateKey, valid_for: dt.timedelta
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + valid_for)
        )

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        file = self._folder / name
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return file


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
