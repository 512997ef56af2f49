"""Checks of this host by `fleet doctor`: ports, certificates, disk, checkpoint. Opens no
connection.
"""

import datetime as dt
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
from cryptography import x509

from fleet.cli.checkpoint import find_checkpoints
from fleet.config import FleetConfig
from fleet.config.safety import Check, Finding
from fleet.config.settings import EnvironmentSettings
from fleet.control.server import require_free_port
from fleet.control.server_checks import full_fleet_bytes
from fleet.core.errors import ConfigError

MIN_DAYS, MAX_SHOWN = 14, 80
COPIES = 3
"""Disk space that an append-only file may need, in multiples of the data: twice the data before it
is rewritten, and the new file beside it.
"""
MIN_FREE_BYTES = 64 * 2**20


def check_ports(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    """Check that this host's ports can be listened on, or are already served by a process of
    Fleet.
    """
    if config.web.port:
        yield _check_port("gateway port", config.web.host, config.web.port, "web.port", "web")
    if settings.redis_url is None and config.redis.port:
        yield _check_port("Redis port", "127.0.0.1", config.redis.port, "redis.port", "server")


def _check_port(subject: str, host: str, port: int, key: str, own: str) -> Finding:
    try:
        require_free_port(host, port, key)
    except ConfigError as error:
        pid, words = _find_listener(port)
        holder = (
            f"process {pid} ({' '.join(words)[:MAX_SHOWN]})" if pid else "a process of another user"
        )
        if own in words or own in Path(words[0]).name:
            return Finding(subject, f"{port} is served by {holder}")
        return Finding(subject, "", refusal=f"{error.message}; {holder} listens on it", param=key)
    return Finding(subject, f"{port} is free")


def _find_listener(port: int) -> tuple[int | None, list[str]]:
    """Return the pid and command line of the process that listens on a TCP port; None and [] if
    this user may not see the process.
    """
    try:
        found = [
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and tuple(one.laddr)[1:2] == (port,)
        ]
        pid = next((pid for pid in found if pid), None)
        return (pid, psutil.Process(pid).cmdline() or [""]) if pid else (None, [""])
    except psutil.Error:
        return None, [""]


def check_certificates(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    """Check the gateway's TLS certificate, and the certificates that REDIS_URL names."""
    web = config.web
    if web.tls_cert is not None and web.tls_key is not None:
        fix = "renew it, and start the gateway again"
        yield _check_pair(
            "gateway certificate", web.tls_cert, web.tls_key, "web.tls_cert", "web.tls_key", fix
        )
    if settings.redis_url is None:
        return
    options = {
        name: values[-1] for name, values in parse_qs(urlsplit(settings.redis_url).query).items()
    }
    if authority := options.get("ssl_ca_certs"):
        fix = "name the file of the new authority"
        yield _check_certificate(
            "Redis authority", Path(authority), "REDIS_URL: ssl_ca_certs", fix, is_bundle=True
        )
    if certificate := options.get("ssl_certfile"):
        key = Path(options.get("ssl_keyfile", certificate))
        fix = "let the authority of Redis sign a new one"
        names = ("REDIS_URL: ssl_certfile", "REDIS_URL: ssl_keyfile")
        password = options.get("ssl_password", "")
        yield _check_pair("Redis client", Path(certificate), key, *names, fix, password)


def _check_pair(
    subject: str,
    certificate: Path,
    key: Path,
    name: str,
    key_name: str,
    fix: str,
    password: str = "",
) -> Finding:
    """Check a certificate's dates, and that the private key belongs to it. `password`: passphrase
    of the key. `name`, `key_name`: settings that name the files. `fix`: remedy in the finding.
    """
    found = _check_certificate(subject, certificate, name, fix)
    if found.refused:
        return found
    try:
        key.read_bytes()
        # A password is asked for on the terminal otherwise.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=password)
    except ssl.SSLError as error:
        refusal = (
            f"{key_name}: {key} is not the key of {certificate} "
            f"({error.reason or error}); name the one it was made with"
        )
        return Finding(subject, "", refusal=refusal, param=key_name)
    except OSError as error:
        return Finding(
            subject,
            "",
            refusal=f"{key_name}: {key} cannot be read ({error.strerror}); correct it",
            param=key_name,
        )
    return found


def _check_certificate(
    subject: str, file: Path, name: str, fix: str, *, is_bundle: bool = False
) -> Finding:
    """Check the validity dates of the first certificate in a file. In a bundle of authorities,
    check the certificate that is valid longest.
    """
    now = dt.datetime.now(dt.UTC)
    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())
        first = (
            max(found, key=lambda one: (one.not_valid_before_utc <= now, one.not_valid_after_utc))
            if is_bundle
            else found[0]
        )
    except OSError as error:
        refusal = (
            f"{name}: {file} cannot be read ({error.strerror}); name a PEM file that this "
            "user may read"
        )
        return Finding(subject, "", refusal=refusal, param=name)
    except ValueError:
        refusal = f"{name}: {file} contains no certificate; name a PEM file"
        return Finding(subject, "", refusal=refusal, param=name)
    days = (first.not_valid_after_utc - now).days
    until = f"{first.not_valid_after_utc:%Y-%m-%d}"
    refusal = f"{name}: {file} expired on {until}; {fix}" if days < 0 else ""
    if first.not_valid_before_utc > now:
        refusal = (
            f"{name}: {file} is valid from {first.not_valid_before_utc:%Y-%m-%d} on; "
            f"correct this host's clock, or {fix}"
        )
    return Finding(
        subject,
        f"{file}, valid for {days} more days",
        refusal=refusal,
        param=name,
        warning=f"{file} expires in {days} days, on {until}; {fix}" if days < MIN_DAYS else "",
    )


def check_disk(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    """Compare the free space for the embedded Redis with the size that its append-only file may
    reach.
    """
    if settings.redis_url is not None:
        return
    folder = config.redis_data_dir
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free, needed = shutil.disk_usage(existing).free, COPIES * full_fleet_bytes(config)
    shown = f"{free / 2**20:.0f} MiB are free for {folder}"
    need = (
        f"with limits.max_requests {config.limits.max_requests} the append-only file may "
        f"take {needed / 2**20:.0f} MiB"
    )
    fix = "free space, or choose another disk with --set redis.data_dir=DIR"
    refusal = f"redis.data_dir: {shown}; {fix}" if free < MIN_FREE_BYTES else ""
    warning = f"{shown}, and {need}: {fix}" if free < needed else ""
    yield Finding(
        "disk",
        f"{shown}; {need}",
        refusal=refusal,
        warning=warning,
        param="redis.data_dir",
    )


def check_checkpoint(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    if config.engine == "fake":
        return
    try:
        for name, found in find_checkpoints(config).items():
            yield Finding(name, found)
    except ConfigError as error:
        yield Finding("checkpoint", "", refusal=error.message, param=error.param or "checkpoint")


FILE_CHECKS: tuple[Check, ...] = (check_certificates, check_disk)
"""Quick checks of files, which `fleet up` also runs."""
