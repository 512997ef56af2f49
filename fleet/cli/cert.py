"""`fleet cert`: a self-signed certificate for gateways."""

import datetime as dt
from pathlib import Path
from typing import Annotated

import typer

Hosts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[HOST]...",
        help="Names and addresses by which clients reach the gateway; by default this machine's.",
    ),
]
Folder = Annotated[Path, typer.Option("--out", help="Folder for cert.pem and key.pem.")]
Days = Annotated[int, typer.Option(min=1, max=3650, help="Days for which it is valid.")]


def cert(hosts: Hosts = None, out: Folder = Path("tls"), days: Days = 365) -> None:
    """Write a self-signed certificate and its private key, for `web.tls_cert` and `web.tls_key`.
    Clients must be given cert.pem to trust it.

    Example: fleet cert voice.example.org 192.0.2.7 --out tls
    """
    from web.http.tls import create_certificate, own_hosts

    named = hosts or own_hosts()
    files = create_certificate(out, named, dt.timedelta(days=days))
    print(f"wrote {files.cert} and {files.key}, valid for {days} days: {', '.join(named)}")
    print(f"serve: fleet up --set web.tls_cert={files.cert} --set web.tls_key={files.key}")
    print(
        f"trust: NODE_EXTRA_CA_CERTS={files.cert} (Node), SSL_CERT_FILE={files.cert} (Python), "
        f"curl --cacert {files.cert}"
    )
