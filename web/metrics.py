"""The gateway's metrics: one catalogue, names with units, on by default. Knows no route."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
RTF = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0)


class Metrics:
    """One gateway's metrics. Each app has a registry of its own, so that tests can run several in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.http = Counter(
            "fleet_http_responses", "HTTP responses.", ("method", "route", "status"), registry=registry
        )
        self.requests = Counter("fleet_requests", "Requests ended, by outcome.", ("outcome",), registry=registry)
        self.in_flight = Gauge("fleet_requests_in_flight", "Answers this gateway is delivering.", registry=registry)
        self.first_text = Histogram(
            "fleet_first_text_seconds", "Submission to first text.", registry=registry, buckets=SECONDS
        )
        self.first_audio = Histogram(
            "fleet_first_audio_seconds", "Submission to first sound.", registry=registry, buckets=SECONDS
        )
        self.e2e = Histogram(
            "fleet_e2e_request_latency_seconds", "Submission to the end.", registry=registry, buckets=SECONDS
        )
        self.rtf = Histogram(
            "fleet_audio_rtf", "Seconds to make a second of sound, whole answer.", registry=registry, buckets=RTF
        )
        self.audio_s = Counter("fleet_audio_seconds", "Seconds of sound delivered.", registry=registry)
        self.prompt_tokens = Counter("fleet_prompt_tokens", "Prompt positions of ended requests.", registry=registry)
        self.answer_tokens = Counter("fleet_answer_tokens", "Text tokens of ended requests.", registry=registry)
        self.edge_chunks = Counter(
            "fleet_edge_chunks", "Chunks received on client edges.", ("edge",), registry=registry
        )
        self.underruns = Counter("fleet_audio_underrun", "Playback underruns the console reported.", registry=registry)
        self.live = Gauge("fleet_requests_live", "Live requests in the whole fleet.", registry=registry)
        self.workers = Gauge("fleet_workers", "Live workers.", ("role",), registry=registry)

    def first(self, medium: str, seconds: float) -> None:
        (self.first_text if medium == "text" else self.first_audio).observe(seconds)

    def request_ended(self, outcome: str, seconds: float, audio_s: float) -> None:
        self.requests.labels(outcome=outcome).inc()
        self.e2e.observe(seconds)
        if audio_s:
            self.audio_s.inc(audio_s)
            self.rtf.observe(seconds / audio_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)
