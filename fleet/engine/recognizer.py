"""The batch loop of a speech recogniser: clips in, transcript tokens out, window by window.

A clip is cut into windows. The model behind the loop opens a window (the encoder pass) and samples
its tokens one by one; a step opens at most one window, and samples one token for each open one. A
window is returned as a whole, since a window whose tokens loop is dropped and recognised again.
Knows no model: the model defines the tokens, and how far a window's tokens reach in the clip.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import EngineError, FleetError, failure_of
from fleet.core.request import Sampling
from fleet.engine.base import TOKEN, Arrays, EngineOutput, EngineRequest
from fleet.engine.repetition import looped_tokens
from fleet.engine.turns import RequestStream, TurnsEngine

log = logging.getLogger(__name__)
Samples = NDArray[np.float32]
SAMPLES, CLIP = "samples", "clip"
"""Names of the input array with a clip's samples, and of the output array with a clip's number."""
BEGINS, ENDS, LOGPROBS, NO_SPEECH, PLACE = "begins", "ends", "logprobs", "no_speech", "place"
"""Names of the output arrays with details of a window."""
LANGUAGE, PROMPT, DETAILS = "language", "prompt", "details"
"""Names of request parameters. `LANGUAGE`: ISO code of the spoken language; without it the language
is detected. `PROMPT`: text that precedes the clip, for names and spellings. `DETAILS`: with any
value, each window is returned with its details.
"""
MARGIN_S = 2.0
"""Silence that a window needs after its speech. With less, a recogniser that was trained on longer
windows repeats the last sentence until the window is full of tokens (measured with windows that end
0.5 to 2 s after the speech).
"""
OVERLAP_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowJob:
    """Window of a clip that is to be recognised.

    `samples`: speech from the beginning of the window on; silence follows up to `num_samples`, the
    window's size. `known`: tokens sampled by an earlier owner, with which the window begins.
    `language`: language of the clip as far as it is known. `timed`: True if the model has to mark
    times in the window, because the clip is longer than a window or the request asks for details.
    `place`: number of the clip, and the clip's sample at which the window begins; both are part of
    the key of the sampling noise.
    """

    samples: Samples
    num_samples: int
    sampling: Sampling
    params: Mapping[str, str]
    known: tuple[int, ...] = ()
    language: str = ""
    timed: bool = False
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardWindow:
    """A recognised window: its tokens up to and including the end token, and the number of samples
    after which the next window begins.
    """

    tokens: tuple[int, ...]
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDetails:
    """What the model knows of a window's tokens. `begins`, `ends`: samples of the window at which
    the word of each token begins and ends, both ascending; `logprobs`: logarithm of each token's
    probability, NaN for an end token that was not sampled; `no_speech`: probability that the window
    has no speech.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    no_speech: float


class OpenWindow(Protocol):
    """State of a window in the model. `tokens`: all tokens of the window so far, including the
    known tokens and the token of a detected language. The end token, once sampled, is the last.
    """

    @property
    def tokens(self) -> Sequence[int]: ...


WindowT = TypeVar("WindowT", bound=OpenWindow)


class RecognizerModel(Protocol[WindowT]):
    """Model behind the loop.

    `window_sizes`: sizes of the model's windows in samples, ascending. `end_token`: the token that
    ends a window. A model that recognises a whole window in one call samples all its tokens in
    `open` and reveals one with each `advance`.
    """

    @property
    def rate_hz(self) -> int: ...

    @property
    def window_sizes(self) -> Sequence[int]: ...

    @property
    def end_token(self) -> int: ...

    def check_request(self, params: Mapping[str, str]) -> None:
        """Raise BadInput naming a request parameter that the model cannot serve."""
        ...

    def open(self, job: WindowJob) -> WindowT:
        """Encode a window and begin its tokens."""
        ...

    def max_tokens(self, job: WindowJob) -> int:
        """Return the largest number of tokens that the model can sample for a window."""
        ...

    def advance(self, windows: Sequence[WindowT]) -> None:
        """Sample the next token of each window. A failed call changes no window."""
        ...

    def hear(self, job: WindowJob, tokens: Sequence[int]) -> HeardWindow:
        """Return the part of a window's `tokens` that is accepted, with the end token, which
        `tokens` may lack, and the place at which the next window begins. The result depends on the
        arguments only; all tokens of an earlier result are accepted again.
        """
        ...

    def details(self, window: WindowT, tokens: Sequence[int]) -> WindowDetails:
        """Return the details of a recognised window. `tokens`: the tokens that `hear` accepted."""
        ...

    def language_of(self, tokens: Sequence[int]) -> str:
        """Return the language that a window's tokens name; "" if they name none."""
        ...

    def check(self) -> None:
        """Raise EngineStopped if every computation on the model's device fails."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Task(RequestStream, Generic[WindowT]):
    """State of a request in the loop. `clips`: clips fed and not yet heard to their end, from
    sample `begin` of the first one on. `known`: tokens of an earlier owner, still to be returned.
    `job`, `window`: the window in progress; a job without a window waits for its encoder pass.
    """

    request: EngineRequest
    known: deque[int]
    clips: deque[Samples] = field(default_factory=deque[Samples])
    number: int = 0
    begin: int = 0
    language: str = ""
    job: WindowJob | None = None
    window: WindowT | None = None


class RecognizerEngine(TurnsEngine[_Task[WindowT]], Generic[WindowT]):
    """Engine that recognises speech. Input arrays: `samples` float32 [n], one clip per piece, mono
    at the model's rate. Output arrays: `token` int32 [n], the tokens of one window up to and
    including the end token, and `clip` int32 [1], the number of their clip. With the parameter
    `details`, also of each window that is recognised: `begins` and `ends` int32 [n], the samples of
    the clip at which the word of each token begins and ends; `logprobs` float32 [n]; `no_speech`
    float32 [1]; and `place` int32 [2], the window's first sample in the clip and the number of
    samples that it was heard for.

    A request's history is the `token` array of its first windows. Complete windows of the history
    are returned again without being recognised; an incomplete last window is continued.
    `has_speech`: judges whether samples contain speech; windows without speech are not recognised.
    If it is None, all windows are recognised. `one_by_one`: sample the token of each window in a
    separate call.
    """

    def __init__(
        self,
        model: RecognizerModel[WindowT],
        *,
        max_batch: int,
        one_by_one: bool = False,
        has_speech: Callable[[Samples], bool] | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._max_batch, self._one_by_one = max_batch, one_by_one
        self._has_speech = has_speech

    def _open(self, request: EngineRequest) -> _Task[WindowT]:
        self._model.check_request(request.params)
        known = request.history.get(TOKEN, np.zeros(0, np.int32))
        return _Task(request_id=request.request_id, request=request, known=deque(known.tolist()))

    def _read(self, stream: _Task[WindowT], arrays: Arrays) -> None:
        if SAMPLES in arrays:
            stream.clips.append(_checked(arrays[SAMPLES]))

    def _has_work(self, stream: _Task[WindowT]) -> bool:
        return bool(stream.clips) or stream.ended or stream.error is not None

    def step(self) -> Sequence[EngineOutput]:
        able = self._able()
        outputs = [self._end(task) for task in able if task.error is not None or not task.clips]
        for task in able:
            if task.error is None and task.clips and task.job is None:
                outputs += self._begin_window(task)
        outputs += self._open_next([task for task in able if task.job and task.window is None])
        outputs += self._advance([task for task in able if task.window is not None])
        return outputs

    def check(self) -> None:
        self._model.check()

    def _begin_window(self, task: _Task[WindowT]) -> list[EngineOutput]:
        """Give a task its next window; return the window's output if it is known already or holds
        no speech. Invariants: the job depends on the clip and the known tokens only.
        """
        longest = self._model.window_sizes[-1]
        samples = task.clips[0][task.begin : task.begin + longest]
        known = self._take_known(task)
        job = WindowJob(
            samples=samples,
            num_samples=longest,
            sampling=task.request.sampling,
            params=task.request.params,
            known=known,
            language=task.language or task.request.params.get(LANGUAGE, ""),
            timed=len(task.clips[0]) > longest or DETAILS in task.request.params,
            place=(task.number, task.begin),
        )
        if self._model.end_token in known[-1:]:
            return [self._hear(task, job, known)]
        if not len(samples) or not (known or self._is_speech(samples)):
            return [self._hear(task, job, ())]
        task.job = replace(job, num_samples=self._window_size(samples))
        return []

    def _take_known(self, task: _Task[WindowT]) -> tuple[int, ...]:
        taken: list[int] = []
        while task.known and self._model.end_token not in taken[-1:]:
            taken.append(task.known.popleft())
        return tuple(taken)

    def _is_speech(self, samples: Samples) -> bool:
        return self._has_speech is None or self._has_speech(samples)

    def _window_size(self, samples: Samples) -> int:
        """Return the smallest size of a window that leaves `MARGIN_S` of silence after the last
        speech, else the largest size.
        """
        *shorter, longest = self._model.window_sizes
        for size in shorter:
            edge = size - round(MARGIN_S * self._model.rate_hz)
            overlap = round(OVERLAP_S * self._model.rate_hz)
            if len(samples) <= edge or not self._is_speech(samples[max(0, edge - overlap) :]):
                return size
        return longest

    def _open_next(self, waiting: Sequence[_Task[WindowT]]) -> list[EngineOutput]:
        """Run the encoder pass of the task that has waited longest, if the batch has room."""
        others = self._requests.values()
        num_open = sum(task.window is not None and not task.paused for task in others)
        if not waiting or num_open >= self._max_batch:
            return []
        task = waiting[0]
        assert task.job is not None, "a window to open has a job"
        try:
            task.window = self._model.open(task.job)
        except (RuntimeError, MemoryError, FleetError) as error:
            log.exception("opening a window of %d samples failed", task.job.num_samples)
            task.error = failure_of("encoding a window of speech failed", error)
            return [self._end(task)]
        return []

    def _advance(self, tasks: Sequence[_Task[WindowT]]) -> list[EngineOutput]:
        going = [task for task in tasks if not self._is_complete(task)]
        groups = [[task] for task in going] if self._one_by_one else [going] if going else []
        outputs = [output for group in groups for output in self._run(group)]
        for task in tasks:
            if task.error is None and self._is_complete(task):
                outputs += self._close(task)
        return outputs

    def _run(self, group: Sequence[_Task[WindowT]]) -> list[EngineOutput]:
        """Sample one token for each task. If that fails, try each task alone, so that only the
        faulty request fails.
        """
        try:
            self._model.advance([task.window for task in group if task.window is not None])
        except (RuntimeError, MemoryError, FleetError) as error:
            log.exception("a decode step of %d windows failed", len(group))
            if len(group) > 1:
                return [output for task in group for output in self._run([task])]
            group[0].error = failure_of("decoding a token of a transcript failed", error)
            return [self._end(group[0])]
        return []

    def _is_complete(self, task: _Task[WindowT]) -> bool:
        assert task.window is not None and task.job is not None, "a window in progress"
        tokens = task.window.tokens
        limit = min(task.request.sampling.max_tokens, self._model.max_tokens(task.job))
        ended = len(tokens) >= limit or self._model.end_token in tokens[-1:]
        return ended or looped_tokens(tokens) > 0

    def _close(self, task: _Task[WindowT]) -> list[EngineOutput]:
        """Return the output of a complete window. A window that loops is recognised again at the
        largest size; if it loops there too, it ends before the loop.
        """
        assert task.window is not None and task.job is not None, "a window in progress"
        job, window, task.window = task.job, task.window, None
        tokens = window.tokens
        num_looped = looped_tokens(tokens)
        longest = self._model.window_sizes[-1]
        if num_looped and job.num_samples < longest:
            task.job = replace(job, num_samples=longest)
            return []
        try:
            return [self._hear(task, job, tokens[: len(tokens) - num_looped], window)]
        except (RuntimeError, MemoryError, FleetError) as error:
            log.exception("the details of a window of %d tokens failed", len(tokens))
            task.error = failure_of("aligning a transcript with its speech failed", error)
            return [self._end(task)]

    def _hear(
        self,
        task: _Task[WindowT],
        job: WindowJob,
        tokens: Sequence[int],
        window: WindowT | None = None,
    ) -> EngineOutput:
        """End the task's window with these tokens, move on to the next window or clip, and return
        the window's output. `window`: state of the window in the model; None if the window was not
        recognised here.
        """
        heard = self._model.hear(job, tokens)
        details = self._details(job, heard, window) if window is not None else {}
        number = task.number
        task.job = None
        task.language = task.language or self._model.language_of(heard.tokens)
        task.begin += heard.num_samples
        if task.begin >= len(task.clips[0]):
            task.clips.popleft()
            task.number += 1
            task.begin = 0
            task.language = ""
        arrays = {TOKEN: np.array(heard.tokens, np.int32), CLIP: np.array([number], np.int32)}
        return self._serve(task, {**arrays, **details}, final=task.ended and not task.clips)

    def _details(self, job: WindowJob, heard: HeardWindow, window: WindowT) -> Arrays:
        if DETAILS not in job.params:
            return {}
        details, (_, first) = self._model.details(window, heard.tokens), job.place
        return {
            BEGINS: (first + details.begins.clip(max=heard.num_samples)).astype(np.int32),
            ENDS: (first + details.ends.clip(max=heard.num_samples)).astype(np.int32),
            LOGPROBS: details.logprobs,
            NO_SPEECH: np.array([details.no_speech], np.float32),
            PLACE: np.array([first, heard.num_samples], np.int32),
        }


def _checked(samples: np.ndarray) -> Samples:
    """Return a clip. Raises: EngineError unless it has finite float32 samples."""
    if samples.ndim != 1 or samples.dtype != np.float32:
        raise EngineError(
            f"samples: expected float32 [n], got {samples.dtype} {list(samples.shape)}",
            param="samples",
        )
    if not np.isfinite(samples).all():
        place = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise EngineError(f"samples: sample {place} is not finite", param="samples")
    return samples
