"""The gateway's metrics: one catalogue, names with units, on by default. Knows no route."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from web.ports import RoleView

SECONDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
RTF = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0)

ROLE_GAUGES = {
    "queue_depth": "Tasks that wait in the role's stream for a worker to claim them.",
    "queue_oldest_seconds": "Age of the oldest of them, since it was granted; 0 without one.",
    "queue_lag": "Those of them that no worker has read yet.",
    "running": "Tasks that the role's workers run.",
    "capacity": "Tasks that its workers could run at once; those that leave or stand by count for nothing.",
    "draining": "Workers that are leaving.",
    "standby": "Workers that are loaded and take nothing until one of the role is lost.",
}


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
        self.cached_tokens = Counter(
            "fleet_cached_prompt_tokens",
            "Prompt positions of ended requests that an earlier turn of the conversation had computed.",
            registry=registry,
        )
        self.answer_tokens = Counter("fleet_answer_tokens", "Text tokens of ended requests.", registry=registry)
        self.edge_chunks = Counter(
            "fleet_edge_chunks", "Chunks received on client edges.", ("edge",), registry=registry
        )
        self.underruns = Counter("fleet_audio_underrun", "Playback underruns the console reported.", registry=registry)
        self.live = Gauge("fleet_requests_live", "Live requests in the whole fleet.", registry=registry)
        self.workers = Gauge("fleet_workers", "Live workers.", ("role",), registry=registry)
        self._of_roles = {
            name: Gauge(f"fleet_role_{name}", what, ("role",), registry=registry) for name, what in ROLE_GAUGES.items()
        }

    def set_roles(self, roles: Sequence[RoleView]) -> None:
        """Replace what is said of roles; one that is not named any more is told no more."""
        for gauge in self._of_roles.values():
            gauge.clear()
        for view in roles:
            values = {
                "queue_depth": view.queue_depth, "queue_oldest_seconds": view.oldest_s, "queue_lag": view.lag,
                "running": view.running, "capacity": view.capacity, "draining": view.draining, "standby": view.standby,
            }  # fmt: skip
            for name, value in values.items():
                self._of_roles[name].labels(role=view.role).set(value)

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
