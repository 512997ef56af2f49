"""Uvicorn's configuration plus the connection table and the TLS context, which the protocol classes
need.
"""

import ssl
from typing import Any

import uvicorn

from web.http.protocol.table import ConnectionTable


class BoundedConfig(uvicorn.Config):
    """Uvicorn's configuration for `BoundedHttp`. `tls` is the context with which `BoundedHttp` does
    the TLS handshake itself, so that connections are counted and timed before its end; None for
    plain HTTP. Uvicorn gets no certificate.
    """

    def __init__(
        self, app: Any, table: ConnectionTable, tls: ssl.SSLContext | None, **options: Any
    ) -> None:
        super().__init__(app, **options)
        self.table = table
        self.tls = tls
