"""A collector of OpenTelemetry for tests: an HTTP server that reads OTLP as protobuf."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(slots=True)
class Collector:
    """What a collector has received. `status`: HTTP status of its next answers."""

    url: str = ""
    status: int = 200
    spans: list[Any] = field(default_factory=list[Any])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    paths: list[str] = field(default_factory=list[str])

    def of(self, request: str) -> dict[str, Any]:
        """Return the spans of an answer by name; the answer's own is "answer"."""
        answer = next(
            span for span in self.spans if attributes_of(span).get("gen_ai.response.id") == request
        )
        own = [span for span in self.spans if span.parent_span_id == answer.span_id]
        return {"answer": answer, **{span.name: span for span in own}}


def attributes_of(item: Any) -> dict[str, Any]:
    """Return the attributes of a span or event."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in item.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class TraceHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.paths.append(self.path)
            collector.headers.append({name.lower(): text for name, text in self.headers.items()})
            if collector.status == 200:
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), TraceHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
