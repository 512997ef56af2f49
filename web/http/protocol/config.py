"""Uvicorn's configuration with what the bounded protocols need: uvicorn hands it to each of them."""

import ssl
from typing import Any

import uvicorn

from web.http.protocol.table import ConnectionTable


class BoundedConfig(uvicorn.Config):
    """`tls`: the handshake is made by `BoundedHttp`, so that connections are counted and timed before it is over. Uvicorn itself
    gets no certificate.
    """

    def __init__(self, app: Any, table: ConnectionTable, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(app, **options)
        self.table = table
        self.tls = tls
