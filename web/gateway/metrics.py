"""Prometheus metrics of one gateway's requests: one catalogue, names with units, on by default. The
registry also holds the fleet's metrics. Knows no route.

Families that vllm-omni has too have its names and meaning, with the prefix `fleet_` and with units
(audio_ttfp, audio_rtf, audio_duration, audio_frames, audio_underrun, audio_continuity_ok,
num_requests_running, num_requests_waiting, requests_success, e2e_request_latency). Underruns and
real-time factors also go to the fleet's time series.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from web.gateway.fleet_metrics import FleetMetrics
from web.gateway.fleet_port import FleetPort

SECONDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)
DURATIONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 60.0, 120.0)
RTF = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 5.0)

CONTINUITY_S = 0.1
"""Longest gap in unbuffered playback, in seconds, with which an answer still counts as continuous.
"""
FINISHED = ("stop", "length", "tool_calls")
"""Outcomes of complete answers. All other outcomes are failures, aborts and disconnects."""


class PlaybackContinuity:
    """Tracks if playback that starts with the first audio could continue without a gap. Units:
    seconds of any one clock.
    """

    def __init__(self) -> None:
        self.ok = True
        self._began_s: float | None = None
        self._audio_s = 0.0

    def add(self, audio_s: float, now_s: float) -> None:
        """Record that `audio_s` seconds of audio have arrived in total by the time `now_s`."""
        if self._began_s is None:
            self._began_s = now_s
        elif now_s > self._began_s + self._audio_s + CONTINUITY_S:
            self.ok = False
        self._audio_s = audio_s


class Metrics:
    """Metrics of one gateway; `fleet` holds the metrics of all workers. A gateway has its own
    registry, so that tests can run several gateways in one process.
    """

    def __init__(self, client: FleetPort, model: str) -> None:
        self.registry = CollectorRegistry()
        self.fleet = FleetMetrics(model)
        self.registry.register(self.fleet)
        self._client = client
        self._model = model
        self._add_request_metrics()
        self._add_audio_metrics()

    def _add_request_metrics(self) -> None:
        self.http = self._counter("http_responses", "HTTP responses.", "method route status")
        self.requests = self._counter("requests", "Ended requests, by outcome.", "outcome")
        self.in_flight = self._gauge("requests_in_flight", "Answers that this gateway is sending.")
        self.live = self._gauge("requests_live", "Live requests in the fleet.")
        self.waiting = self._gauge(
            "requests_waiting", "Requests that wait at this gateway for a place in the fleet."
        )
        self.success = self._counter(
            "requests_success", "Complete answers, by finish reason.", "model_name finished_reason"
        )
        self.first_text = self._histogram(
            "first_text_seconds", "Time from submission to the first text.", SECONDS, ""
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from submission to the end of the answer.", SECONDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens",
            "Prompt tokens of ended requests that a previous turn of the conversation had "
            "computed.",
        )
        self.answer_tokens = self._counter("answer_tokens", "Text tokens of ended requests.")
        self.exported = self._counter(
            "exported_answers",
            "Ended answers for the collector of telemetry.otlp, by outcome: sent or lost.",
            "outcome",
        )
        self.edge_chunks = self._counter("edge_chunks", "Chunks received on client edges.", "edge")

    def _add_audio_metrics(self) -> None:
        self.audio_ttfp = self._histogram(
            "audio_ttfp_seconds", "Time from submission to the first audio sent.", SECONDS
        )
        self._voice_to_voice = self._histogram(
            "voice_to_voice_seconds",
            "Time from the last voiced sample of a turn to the first of its answer.",
            SECONDS,
        )
        self.rtf = self._histogram(
            "audio_rtf", "Real-time factor of an answer: its latency over its audio duration.", RTF
        )
        self.audio = self._histogram(
            "audio_duration_seconds", "Audio duration of an answer.", DURATIONS
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
        self.underruns = self._counter(
            "audio_underrun", "Playback underruns that clients reported."
        )

    def _counter(self, name: str, text: str, labels: str = "") -> Counter:
        return Counter(f"fleet_{name}", text, labels.split(), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"fleet_{name}", text, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: str = "model_name"
    ) -> Histogram:
        return Histogram(
            f"fleet_{name}", text, labels.split(), registry=self.registry, buckets=buckets
        )

    def observe_first_output(self, medium: str, seconds: float) -> None:
        if medium == "text":
            self.first_text.observe(seconds)
        else:
            self.audio_ttfp.labels(self._model).observe(seconds)

    def observe_voice_to_voice(self, seconds: float) -> None:
        """Record a voice-to-voice latency: the time from the last voiced sample of the user's turn
        to the first voiced sample of the response.
        """
        self._voice_to_voice.labels(self._model).observe(seconds)

    def count_underruns(self, count: int) -> None:
        """Record the number of playback underruns that a client reported."""
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
