"""The gateway's metrics: one catalogue, names with units, on by default. Knows no route.

Families that vllm-omni has too bear its words and its meaning (audio_ttfp, audio_rtf, audio_duration, audio_frames,
audio_underrun, audio_continuity_ok, num_requests_running, num_requests_waiting, requests_success, e2e_request_latency, and
transfers'), with our prefix and with units spelt out. What the process counts is also told to the fleet's time series.
"""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fleet.core.ids import stage_of
from fleet.core.pulls import PullCounts
from fleet.core.telemetry import RoleView, WorkerView
from web.ports import FleetPort

SECONDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
DURATIONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 60.0, 120.0)
RTF = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0)

GATEWAY_ROLE = "gateway"
TRANSFER_BOUNDS_PER_DECADE = 4
CONTINUITY_S = 0.1
"""A listener who begins to play at once may wait so long for more before the answer counts as broken."""
FINISHED = ("stop", "length")
"""Outcomes of answers that came to their end; the others are failures and departures."""

ROLE_GAUGES = {
    "queue_depth": "Tasks that wait in the role's stream for a worker to claim them.",
    "queue_oldest_seconds": "Age of the oldest of them, since it was granted; 0 without one.",
    "queue_lag": "Those of them that no worker has read yet.",
    "running": "Tasks that the role's workers run.",
    "capacity": "Tasks that its workers could run at once; those that leave or stand by count for nothing.",
    "draining": "Workers that are leaving.",
    "standby": "Workers that are loaded and take nothing until one of the role is lost.",
}


class TransferCollector(Collector):
    """Reads of other workers' memory by the listed workers since they joined, as they were last set."""

    def __init__(self) -> None:
        self.counts: Mapping[str, PullCounts] = {}

    def collect(self) -> Iterable[Metric]:
        pulls = CounterMetricFamily("fleet_transfer_pulls", "Reads of another worker's memory.", labels=["edge"])
        size = CounterMetricFamily("fleet_transfer_bytes", "Bytes read from other workers' memory.", labels=["edge"])
        failures = CounterMetricFamily("fleet_transfer_failures", "Failed reads of another worker's memory.", labels=["edge"])
        in_flight = GaugeMetricFamily("fleet_transfer_in_flight", "Reads of another worker's memory under way.", labels=["edge"])
        duration = HistogramMetricFamily(
            "fleet_transfer_duration_seconds", "Duration of a read of another worker's memory.", labels=["edge"]
        )
        for edge, counts in self.counts.items():
            pulls.add_metric([edge], counts.num_pulls)
            size.add_metric([edge], counts.num_bytes)
            failures.add_metric([edge], counts.num_failed)
            in_flight.add_metric([edge], counts.in_flight)
            buckets = [(str(bound_us / 1e6), float(count)) for bound_us, count in counts.cumulative(TRANSFER_BOUNDS_PER_DECADE)]
            duration.add_metric([edge], [*buckets, ("+Inf", float(counts.num_pulls))], counts.total_us / 1e6)
        yield from (pulls, size, failures, in_flight, duration)


class Continuity:
    """Whether sound came before a listener who plays at once had to wait for it. Units: seconds of any one clock."""

    def __init__(self) -> None:
        self.ok = True
        self._began_s: float | None = None
        self._made_s = 0.0

    def came(self, made_s: float, now_s: float) -> None:
        """There are `made_s` of sound in all."""
        if self._began_s is None:
            self._began_s = now_s
        elif now_s > self._began_s + self._made_s + CONTINUITY_S:
            self.ok = False
        self._made_s = made_s


class Metrics:
    """One gateway's metrics. Each app has a registry of its own, so that tests can run several in one process."""

    def __init__(self, client: FleetPort, model: str) -> None:
        self.registry = CollectorRegistry()
        self._client, self._model = client, model
        self.http = self._counter("http_responses", "HTTP responses.", "method", "route", "status")
        self.requests = self._counter("requests", "Requests ended, by outcome.", "outcome")
        self.in_flight = self._gauge("requests_in_flight", "Answers this gateway is delivering.")
        self.success = self._counter("requests_success", "Answers that came to their end.", "model_name", "finished_reason")
        self.first_text = self._histogram("first_text_seconds", "Submission to first text.", SECONDS)
        self.audio_ttfp = self._histogram("audio_ttfp_seconds", "Submission to the first sound sent.", SECONDS, "model_name")
        self._voice_to_voice = self._histogram(
            "voice_to_voice_seconds", "Last voiced sample of a spoken turn to the first of its answer.", SECONDS, "model_name"
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Submission to the end.", SECONDS, "model_name")
        self.rtf = self._histogram("audio_rtf", "Seconds to make a second of sound, whole answer.", RTF, "model_name")
        self.audio = self._histogram("audio_duration_seconds", "Sound of an answer.", DURATIONS, "model_name")
        self.frames = self._counter("audio_frames", "Codec frames of answers delivered.", "model_name")
        self.continuity = self._counter(
            "audio_continuity_ok", "Spoken answers that left no listener waiting for 0.1 s.", "model_name"
        )
        self.spoken = self._counter("audio_answers", "Spoken answers, to compare with.", "model_name")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt positions of ended requests.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt positions of ended requests that an earlier turn of the conversation had computed."
        )
        self.answer_tokens = self._counter("answer_tokens", "Text tokens of ended requests.")
        self.edge_chunks = self._counter("edge_chunks", "Chunks received on client edges.", "edge")
        self.underruns = self._counter("audio_underrun", "Playback underruns that listeners' players reported.")
        self.live = self._gauge("requests_live", "Live requests in the whole fleet.")
        self.workers = self._gauge("workers", "Live workers.", "role")
        self._running = self._gauge("num_requests_running", "Tasks that a worker runs.", "model_name", "stage", "replica")
        self._waiting = self._gauge("num_requests_waiting", "Tasks that wait for a worker.", "model_name", "stage")
        self._of_roles = {name: self._gauge(f"role_{name}", what, "role") for name, what in ROLE_GAUGES.items()}
        self.transfers = TransferCollector()
        self.registry.register(self.transfers)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"fleet_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"fleet_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"fleet_{name}", what, labels, registry=self.registry, buckets=buckets)

    def set_workers(self, workers: Sequence[WorkerView], roles: Sequence[RoleView]) -> None:
        """Replace what is said of workers; one that is gone is told no more."""
        for gauge in (self.workers, self._running, self._waiting):
            gauge.clear()
        for view in workers:
            self.workers.labels(role=view.role or GATEWAY_ROLE).inc()
            if view.role:
                self._running.labels(self._model, stage_of(view.role), view.id).set(view.running)
        for role in roles:
            self._waiting.labels(self._model, stage_of(role.role)).inc(role.queue_depth)

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
        if medium == "text":
            self.first_text.observe(seconds)
        else:
            self.audio_ttfp.labels(self._model).observe(seconds)

    def answered_aloud(self, seconds: float) -> None:
        """A spoken turn was answered: from its last voiced sample to the answer's first one."""
        self._voice_to_voice.labels(self._model).observe(seconds)

    def underrun(self, count: int) -> None:
        """A listener's player ran dry so often."""
        self.underruns.inc(count)
        self._client.telemetry.record_underruns(count)

    def request_ended(self, outcome: str, seconds: float, audio_s: float, *, num_frames: int, continuous: bool) -> None:
        self.requests.labels(outcome=outcome).inc()
        self.e2e.labels(self._model).observe(seconds)
        if outcome in FINISHED:
            self.success.labels(self._model, outcome).inc()
        if audio_s:
            self.spoken.labels(self._model).inc()
            self.continuity.labels(self._model).inc(continuous)
            self.audio.labels(self._model).observe(audio_s)
            self.frames.labels(self._model).inc(num_frames)
            self.rtf.labels(self._model).observe(seconds / audio_s)
            self._client.telemetry.record_rtf(seconds / audio_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)
