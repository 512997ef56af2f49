"""The gateway's metrics: one catalogue, names with units, on by default. Knows no route.

Families that vllm-omni has too have its names and meaning, with the prefix `fleet_` and with units
(audio_ttfp, audio_rtf, audio_duration, audio_frames, audio_underrun, audio_continuity_ok,
num_requests_running, num_requests_waiting, requests_success, e2e_request_latency). Underruns and
real-time factors also go to the fleet's time series.
"""

from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from fleet.core.ids import stage_of
from fleet.telemetry.counts import BOUNDS_US
from fleet.telemetry.routes import routes_of
from fleet.telemetry.views import EdgeTransfer, RoleView, Transfers, WorkerView
from web.ports import FleetPort

SECONDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
DURATIONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 60.0, 120.0)
RTF = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0)

GATEWAY_ROLE = "gateway"
CONTINUITY_S = 0.1
"""Gap in the audio that playback without a buffer tolerates before the answer counts as
discontinuous.
"""
BUCKET_STEP = 6
"""Bounds of durations are 12 % apart; every sixth doubles."""
FINISHED = ("stop", "length")
"""Outcomes of complete answers; the others are failures, aborts and disconnects."""

ROLE_GAUGES = {
    "queue_depth": "Granted tasks of the role that no worker has claimed.",
    "queue_oldest_seconds": "Time since the grant of the role's oldest unclaimed task; 0 "
    "without one.",
    "queue_lag": "Unclaimed tasks of the role that no worker has read yet.",
    "running": "Tasks that workers of the role run.",
    "capacity": "Tasks that the role's workers can run together, without draining and standby "
    "workers.",
    "draining": "Workers of the role that finish their tasks and claim no others.",
    "standby": "Loaded workers that receive no tasks until a worker of the role is lost.",
}


class PlaybackContinuity:
    """Tracks if playback that starts with the first audio could continue without a gap. Units:
    seconds of any one clock.
    """

    def __init__(self) -> None:
        self.ok = True
        self._began_s: float | None = None
        self._audio_s = 0.0

    def add(self, audio_s: float, now_s: float) -> None:
        """Record that `audio_s` of audio have arrived in total."""
        if self._began_s is None:
            self._began_s = now_s
        elif now_s > self._began_s + self._audio_s + CONTINUITY_S:
            self.ok = False
        self._audio_s = audio_s


class TransferMetrics:
    """Reads of other workers' memory, by edge: a collector, since the workers count them and the
    gateway only shows the sums.
    """

    def __init__(self) -> None:
        self.edges: Sequence[EdgeTransfer] = ()

    def collect(self) -> Iterator[Metric]:
        pulls = CounterMetricFamily(
            "fleet_transfer_pulls",
            "Reads of another worker's memory, by the live workers.",
            labels=["edge"],
        )
        num_bytes = CounterMetricFamily(
            "fleet_transfer_bytes", "Bytes of these reads.", labels=["edge"]
        )
        failures = CounterMetricFamily(
            "fleet_transfer_failures", "Reads that were repeated or recomputed.", labels=["edge"]
        )
        in_flight = GaugeMetricFamily(
            "fleet_transfer_in_flight", "Unfinished reads.", labels=["edge"]
        )
        seconds = HistogramMetricFamily(
            "fleet_transfer_seconds",
            "Duration of a read; the sum is up to 12 % high.",
            labels=["edge"],
        )
        for edge in self.edges:
            pulls.add_metric([edge.edge], edge.num_pulls)
            num_bytes.add_metric([edge.edge], edge.num_bytes)
            failures.add_metric([edge.edge], edge.num_failed)
            in_flight.add_metric([edge.edge], edge.in_flight)
            seconds.add_metric([edge.edge], *_histogram_of(edge))
        yield from (pulls, num_bytes, failures, in_flight, seconds)


class SpanMetrics:
    """Passes of the processes of divided models: a collector, since each process counts its own."""

    def __init__(self) -> None:
        self.workers: Sequence[WorkerView] = ()

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "worker"]
        passes = CounterMetricFamily(
            "fleet_span_passes",
            "Passes of a divided model that the worker computed.",
            labels=labels,
        )
        rows = CounterMetricFamily("fleet_span_rows", "Rows of these passes.", labels=labels)
        seconds = CounterMetricFamily(
            "fleet_span_seconds",
            "Time of these passes in the worker: compute, wait or send.",
            labels=[*labels, "phase"],
        )
        whole = CounterMetricFamily(
            "fleet_span_pass_seconds",
            "Time from the beginning of passes to their ends.",
            labels=labels,
        )
        num_bytes = CounterMetricFamily(
            "fleet_span_bytes",
            "Bytes on the worker's connections: received or sent.",
            labels=[*labels, "direction"],
        )
        weights = GaugeMetricFamily(
            "fleet_span_weight_bytes", "Bytes of the weights of the worker's layers.", labels=labels
        )
        unused = GaugeMetricFamily(
            "fleet_span_unused", "Span workers in no route.", labels=["role"]
        )
        for view, part in [(view, view.part) for view in self.workers if view.part is not None]:
            own, figures, total = [view.role, view.id], part.figures, part.figures.total
            passes.add_metric(own, total.num_passes)
            rows.add_metric(own, total.num_rows)
            for phase, spent_us in (
                ("compute", total.computed_us),
                ("wait", total.waited_us),
                ("send", total.sent_us),
            ):
                seconds.add_metric([*own, phase], spent_us / 1e6)
            if part.is_anchor:
                whole.add_metric(own, total.took_us / 1e6)
            num_bytes.add_metric([*own, "received"], figures.received_bytes)
            num_bytes.add_metric([*own, "sent"], figures.sent_bytes)
            weights.add_metric(own, figures.weight_bytes)
        roles = {
            view.role: 0
            for view in self.workers
            if view.part is not None and not view.part.is_anchor
        }
        for role, count in (
            roles | Counts(free.role for free in routes_of(self.workers).unused)
        ).items():
            unused.add_metric([role], count)
        yield from (passes, rows, seconds, whole, num_bytes, weights, unused)


class DraftMetrics:
    """Guessed tokens that workers verified: a collector, since each worker counts its own."""

    def __init__(self) -> None:
        self.workers: Sequence[WorkerView] = ()

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "worker", "drafter"]
        draws = CounterMetricFamily(
            "fleet_draft_passes",
            "Passes of requests that ended in draws, each counted.",
            labels=labels,
        )
        labels = [*labels, "position"]
        drafted = CounterMetricFamily(
            "fleet_draft_tokens", "Guessed tokens that were verified, by position.", labels=labels
        )
        accepted = CounterMetricFamily(
            "fleet_draft_accepted_tokens", "Those that were drawn, by position.", labels=labels
        )
        for view, figures in [
            (view, view.speculation) for view in self.workers if view.speculation is not None
        ]:
            own = [view.role, view.id, figures.drafter]
            draws.add_metric(own, figures.num_draws)
            for position, (asked, drawn) in enumerate(
                zip(figures.drafted, figures.accepted, strict=True), start=1
            ):
                drafted.add_metric([*own, str(position)], asked)
                accepted.add_metric([*own, str(position)], drawn)
        yield from (draws, drafted, accepted)


def _histogram_of(edge: EdgeTransfer) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts, at every `BUCKET_STEP`th of the bounds that workers count by, and the sum.
    Units: seconds.
    """
    bounds_s = [bound / 1e6 for bound in BOUNDS_US]
    counts = edge.durations or (0,) * len(bounds_s)
    totals = list(accumulate(counts))
    buckets = [
        (floatToGoString(bounds_s[at]), float(totals[at]))
        for at in range(0, len(bounds_s), BUCKET_STEP)
    ]
    return [*buckets, ("+Inf", float(totals[-1]))], sum(
        bound * count for bound, count in zip(bounds_s, counts, strict=True)
    )


class Metrics:
    """One gateway's metrics, in a registry of their own, so that tests can run several gateways in
    one process.
    """

    def __init__(self, client: FleetPort, model: str) -> None:
        self.registry = CollectorRegistry()
        self._client, self._model = client, model
        self.http = self._counter("http_responses", "HTTP responses.", "method", "route", "status")
        self.requests = self._counter("requests", "Ended requests, by outcome.", "outcome")
        self.in_flight = self._gauge("requests_in_flight", "Answers that this gateway is sending.")
        self.success = self._counter(
            "requests_success",
            "Complete answers, by finish reason.",
            "model_name",
            "finished_reason",
        )
        self.first_text = self._histogram(
            "first_text_seconds", "Time from submission to the first text.", SECONDS
        )
        self.audio_ttfp = self._histogram(
            "audio_ttfp_seconds",
            "Time from submission to the first audio sent.",
            SECONDS,
            "model_name",
        )
        self._voice_to_voice = self._histogram(
            "voice_to_voice_seconds",
            "Time from the last voiced sample of a turn to the first of its answer.",
            SECONDS,
            "model_name",
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds",
            "Time from submission to the end of the answer.",
            SECONDS,
            "model_name",
        )
        self.rtf = self._histogram(
            "audio_rtf",
            "Real-time factor of an answer: its latency over its audio duration.",
            RTF,
            "model_name",
        )
        self.audio = self._histogram(
            "audio_duration_seconds", "Audio duration of an answer.", DURATIONS, "model_name"
        )
        self.frames = self._counter("audio_frames", "Codec frames of sent answers.", "model_name")
        self.continuity = self._counter(
            "audio_continuity_ok",
            "Spoken answers without a gap of more than 0.1 s in playback.",
            "model_name",
        )
        self.spoken = self._counter(
            "audio_answers", "Spoken answers, the total for audio_continuity_ok.", "model_name"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens",
            "Prompt tokens of ended requests that a previous turn of the conversation had "
            "computed.",
        )
        self.answer_tokens = self._counter("answer_tokens", "Text tokens of ended requests.")
        self.edge_chunks = self._counter("edge_chunks", "Chunks received on client edges.", "edge")
        self.underruns = self._counter(
            "audio_underrun", "Playback underruns that clients reported."
        )
        self.live = self._gauge("requests_live", "Live requests in the fleet.")
        self.workers = self._gauge("workers", "Live workers.", "role")
        self._running = self._gauge(
            "num_requests_running",
            "Tasks that the worker (`replica`) runs.",
            "model_name",
            "stage",
            "replica",
        )
        self._waiting = self._gauge(
            "num_requests_waiting",
            "Granted tasks of the stage that no worker has claimed.",
            "model_name",
            "stage",
        )
        self._role_gauges = {
            name: self._gauge(f"role_{name}", text, "role") for name, text in ROLE_GAUGES.items()
        }
        self._transfers = TransferMetrics()
        self._spans, self._drafts = SpanMetrics(), DraftMetrics()
        self.registry.register(self._transfers)
        self.registry.register(self._spans)
        self.registry.register(self._drafts)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"fleet_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"fleet_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"fleet_{name}", text, labels, registry=self.registry, buckets=buckets)

    def set_workers(self, workers: Sequence[WorkerView], roles: Sequence[RoleView]) -> None:
        """Replace the metrics of all workers; those of absent workers are removed."""
        self._spans.workers = self._drafts.workers = workers
        for gauge in (self.workers, self._running, self._waiting):
            gauge.clear()
        for view in workers:
            self.workers.labels(role=view.role or GATEWAY_ROLE).inc()
            if view.role:
                self._running.labels(self._model, stage_of(view.role), view.id).set(view.running)
        for role in roles:
            self._waiting.labels(self._model, stage_of(role.role)).inc(role.queue_depth)

    def set_transfers(self, transfers: Transfers | None) -> None:
        """Replace the metrics of transfers; None where they cannot be read."""
        self._transfers.edges = transfers.edges if transfers is not None else ()

    def set_roles(self, roles: Sequence[RoleView]) -> None:
        """Replace the gauges of all roles; those of absent roles are removed."""
        for gauge in self._role_gauges.values():
            gauge.clear()
        for view in roles:
            values = {
                "queue_depth": view.queue_depth,
                "queue_oldest_seconds": view.oldest_s,
                "queue_lag": view.lag,
                "running": view.running,
                "capacity": view.capacity,
                "draining": view.draining,
                "standby": view.standby,
            }
            for name, value in values.items():
                self._role_gauges[name].labels(role=view.role).set(value)

    def observe_first_output(self, medium: str, seconds: float) -> None:
        if medium == "text":
            self.first_text.observe(seconds)
        else:
            self.audio_ttfp.labels(self._model).observe(seconds)

    def observe_voice_to_voice(self, seconds: float) -> None:
        """Record the time from the last voiced sample of a turn to the first one of its answer."""
        self._voice_to_voice.labels(self._model).observe(seconds)

    def count_underruns(self, count: int) -> None:
        """Count playback underruns that a client reported."""
        self.underruns.inc(count)
        self._client.telemetry.record_underruns(count)

    def observe_request_end(
        self, outcome: str, seconds: float, audio_s: float, *, num_frames: int, continuous: bool
    ) -> None:
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
