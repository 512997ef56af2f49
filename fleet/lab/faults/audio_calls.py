"""Speech and transcription calls under faults. A client cannot resume such a call, and therefore
repeats the call if its gateway is lost. The answer must equal the answer without faults.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from fleet.graphs import Graph
from fleet.lab.client.client import ApiClient, SpeechCall
from fleet.lab.client.errors import ApiError, ApiRefused, ApiUnreachable
from fleet.lab.faults.client_threads import ClientThreads
from fleet.lab.faults.clients import FULL, UNAVAILABLE
from fleet.lab.measure.prompts import PROMPTS

SPEECH, TRANSCRIPTION = "speech", "transcription"
MAX_SPOKEN_CHARS = 60
"""Length of the prompts that are spoken: a clip of about four seconds at most."""
NUM_CLIENTS = 2
SILENCE_S = 20.0
"""Read time-out of a call, after which its gateway counts as frozen. The time-out is longer than
for streamed answers, because a transcript arrives as a whole.
"""
GIVE_UP_S = 180.0
"""Time after which a call that is sent again and again counts as lost."""
RETRY_S = 0.2


class AudioOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A call and its outcome. `tries`: number of times that the call was sent, 0 if its answer did
    not end. `lost`: reason why the call was not answered, else "". `different`: whether the answer
    differs from the answer without faults. Units: seconds since the phase began.
    """

    kind: str
    sent_s: float
    ended_s: float
    tries: int
    lost: str = ""
    different: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioCall:
    """A text to speak, or a WAV file `clip` to transcribe; the other field is empty. `seed`: seed
    of the random noise with which the voice is generated.
    """

    text: str = ""
    clip: bytes = b""
    seed: int = 0

    @property
    def kind(self) -> str:
        return TRANSCRIPTION if self.clip else SPEECH

    def answer(self, api: ApiClient, model: str) -> bytes:
        """Send the call and return its whole answer: PCM, or text. Raises: ApiError."""
        if self.clip:
            return api.transcribe(model, self.clip).encode()
        call = SpeechCall(model=model, input=self.text, response_format="pcm", seed=self.seed)
        return api.speech(call)


def has_audio_calls(graph: Graph) -> bool:
    """Return True if a graph recognises speech and speaks texts in stages of their own."""
    return {"audio", "transcript"} <= set(graph.media.values())


def spoken_prompts(api: ApiClient, model: str) -> list[bytes]:
    """Return short prompts, spoken by the fleet itself, as WAV files. Raises: ApiError."""
    return [
        api.speech(SpeechCall(model=model, input=prompt, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
        if len(prompt) <= MAX_SPOKEN_CHARS
    ]


def make_calls(clips: Sequence[bytes]) -> list[AudioCall]:
    """Return a transcription call for each clip, alternating with equally many speech calls."""
    calls: list[AudioCall] = []
    for seed, (clip, text) in enumerate(zip(clips, reversed(PROMPTS), strict=False)):
        calls += [AudioCall(clip=clip), AudioCall(text=text, seed=seed)]
    return calls


class AudioLoad:
    """Clients that send the calls in rounds, each at least once."""

    def __init__(
        self, urls: Sequence[str], api_key: str | None, model: str, calls: Sequence[AudioCall]
    ) -> None:
        self._apis = [ApiClient(url, api_key, timeout_s=SILENCE_S) for url in urls]
        self._model, self._calls = model, calls
        self._threads = ClientThreads()
        self._began_s = time.perf_counter()
        self._lock = threading.Lock()
        self._expected: list[bytes] = []
        self._outcomes: list[AudioOutcome] = []
        self._open: dict[int, float] = {}

    @property
    def count(self) -> int:
        """Number of different calls."""
        return len(self._calls)

    def record_reference(self, step: Callable[[], None]) -> None:
        """Record the undisturbed answers. Raises: ApiError."""
        for call in self._calls:
            self._expected.append(call.answer(self._apis[0], self._model))
            step()

    def running(self, step: Callable[[], None]) -> AbstractContextManager[None]:
        """Send calls during the block. `step` is called after each answer."""
        self._began_s = time.perf_counter()
        count = min(NUM_CLIENTS, len(self._calls))

        def run(client: int) -> None:
            for number in itertools.count(client, count):
                if self._threads.cancelled.is_set() or (
                    self._threads.finishing.is_set() and number >= len(self._calls)
                ):
                    return
                self._send(number)
                step()

        return self._threads.running(count, run)

    def finish(self, timeout_s: float = GIVE_UP_S + SILENCE_S) -> tuple[AudioOutcome, ...]:
        """Wait for the last answers and return all outcomes. A call that has no answer after
        `timeout_s` counts as lost.
        """
        self._threads.join(timeout_s)
        self._threads.cancelled.set()
        with self._lock:
            still_open = [
                self._outcome(number, sent_s, 0, lost="its answer did not end")
                for number, sent_s in self._open.items()
            ]
            return (*self._outcomes, *still_open)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _send(self, number: int) -> None:
        sent_s = self._now_s()
        self._open[number] = sent_s
        outcome = self._answered(number, sent_s)
        with self._lock:
            del self._open[number]
            self._outcomes.append(outcome)

    def _answered(self, number: int, sent_s: float) -> AudioOutcome:
        """Send a call to one gateway after another until it is answered, and return its outcome."""
        at = number % len(self._calls)
        for tries in itertools.count(1):
            api = self._apis[(number + tries) % len(self._apis)]
            try:
                answer = self._calls[at].answer(api, self._model)
                different = answer != self._expected[at]
                return self._outcome(number, sent_s, tries, different=different)
            except ApiError as error:
                is_late = self._now_s() - sent_s > GIVE_UP_S or self._threads.cancelled.is_set()
                if is_late or not _is_passing(error):
                    return self._outcome(number, sent_s, tries, lost=str(error))
            self._threads.cancelled.wait(RETRY_S)
        raise AssertionError("unreachable")

    def _outcome(
        self, number: int, sent_s: float, tries: int, *, lost: str = "", different: bool = False
    ) -> AudioOutcome:
        return AudioOutcome(
            kind=self._calls[number % len(self._calls)].kind,
            sent_s=sent_s,
            ended_s=self._now_s(),
            tries=tries,
            lost=lost,
            different=different,
        )


def _is_passing(error: ApiError) -> bool:
    """Return True if the call may succeed when it is repeated, at this gateway or at another."""
    if isinstance(error, ApiRefused):
        return error.http_status in (FULL, UNAVAILABLE)
    return isinstance(error, ApiUnreachable)
