"""Connection to a collector of OpenTelemetry, over OTLP/HTTP. Blocks; knows no queue."""

import socket
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from fleet.config.web_schema import OtlpConfig
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.core.trace_context import parse_traceparent
from fleet.process.private import read_closed_file
from fleet.telemetry.trace import RequestTrace
from web.fleet_api.otlp.spans import spans_of

PATH = "/v1/traces"
TIMEOUT_S = 5.0
"""Time for sending one batch, with all repetitions."""
HEADERS = "telemetry.otlp.headers_file"
MAX_HEADERS_BYTES = 64 * 1024


class SpanSender:
    """Sender of one gateway. Raises: ConfigError if the file of headers cannot be used."""

    def __init__(self, settings: OtlpConfig, main: StageName, gateway: str) -> None:
        assert settings.endpoint is not None
        has_path = urlsplit(settings.endpoint).path not in ("", "/")
        session = requests.Session()
        session.trust_env = False
        self._share = settings.share
        self._main = main
        self._resource = Resource(
            {
                "service.name": "fleet",
                "service.instance.id": gateway,
                "host.name": socket.gethostname(),
            }
        )
        self._exporter = OTLPSpanExporter(
            endpoint=settings.endpoint if has_path else settings.endpoint.rstrip("/") + PATH,
            headers=read_headers(settings.headers_file),
            timeout=TIMEOUT_S,
            compression=Compression.Gzip,
            session=session,
        )

    def wants(self, trace: RequestTrace) -> bool:
        """Return True if the trace is to be sent: by the `traceparent` of the caller if there is
        one, otherwise for the configured share of the answers, chosen by request id.
        """
        caller = parse_traceparent(trace.traceparent)
        if caller is not None:
            return caller.is_sampled
        return zlib.crc32(trace.id.encode()) < self._share * 2**32

    def send(self, traces: Sequence[RequestTrace]) -> bool:
        """Send the spans of ended requests. Return False if the collector did not take them."""
        spans = [span for trace in traces for span in spans_of(trace, self._main, self._resource)]
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Stop repeating a batch that the collector has not taken yet."""
        self._exporter.shutdown()


def read_headers(path: Path | None) -> Mapping[str, str]:
    """Read a file with a line `Name: value` for each header. Errors name the line, not its content.
    Raises: ConfigError.
    """
    if path is None:
        return {}
    raw = read_closed_file(path, HEADERS, MAX_HEADERS_BYTES)
    headers: dict[str, str] = {}
    for number, line in enumerate(raw.decode("latin-1").splitlines(), start=1):
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not line.strip():
            continue
        if not colon or not value or not name.replace("-", "").isalnum():
            raise ConfigError(
                f"{HEADERS}: line {number} of {path} is not `Name: value`", param=HEADERS
            )
        headers[name] = value
    return headers
