"""The batch loop of a stateful decoder: frames of codes in, samples out, window by window.

Each step runs one pass over windows of equal length. Windows of different lengths run in different
passes: on a CPU padding costs more than a pass. Knows no model: the decoder defines states, and
which windows may share a pass.
"""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, ConfigError, EngineError, FleetError, failure_of
from fleet.core.ids import RequestId, Walk
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats

log = logging.getLogger(__name__)
StateT = TypeVar("StateT")
_BEFORE_ANY_INPUT = Walk("")


class WindowDecoder(Protocol[StateT]):
    """The model behind the loop. A state is immutable: a failed pass changes none."""

    @property
    def num_codebooks(self) -> int: ...

    @property
    def codebook_size(self) -> int: ...

    def open(self) -> StateT:
        """The state before the first frame."""
        ...

    @property
    def settling_samples(self) -> int:
        """Number of samples after skipped windows that are not exact yet."""
        ...

    def group(self, state: StateT) -> Hashable:
        """Return the state's group: only states of one group may share a pass."""
        ...

    def num_samples(self, state: StateT, num_frames: int) -> int:
        """Return the number of samples that a window of `num_frames` yields."""
        ...

    def skip(self, states: Sequence[StateT], codes_BTQ: NDArray[np.int32]) -> Sequence[StateT]:
        """Return the next states after windows whose audio is known; one pass, much cheaper than
        decoding.
        """
        ...

    def decode(
        self, states: Sequence[StateT], codes_BTQ: NDArray[np.int32]
    ) -> tuple[Sequence[StateT], NDArray[np.float32]]:
        """Run one pass over B windows of T frames; return the next states, and the samples, B x
        samples.
        """
        ...

    def check(self) -> None:
        """Raise EngineStopped if the device fails every computation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy:
    """Sizes of windows. `ramp` counts frames per window; its last number repeats.

    `invariant`: window k has ramp[k] frames however they arrive, and waits until it is full or the
    input has ended; windows run one by one. Otherwise a window is all frames that have arrived, at
    most the longest of the ramp, so that none starves.
    Raises: ConfigError if the ramp is empty or not positive.
    """

    ramp: tuple[int, ...]
    invariant: bool = False

    def __post_init__(self) -> None:
        if not self.ramp or min(self.ramp) < 1:
            raise ConfigError(
                f"window ramp {self.ramp}: give one or more window sizes of at least 1 frame",
                param="policy.ramp",
            )

    def num_frames(self, window_index: int, num_waiting: int, *, ended: bool) -> int:
        """Return the frames of the next window; 0 while it must wait for more."""
        if not self.invariant:
            return min(num_waiting, max(self.ramp))
        size = self.ramp[min(window_index, len(self.ramp) - 1)]
        return min(num_waiting, size) if ended or num_waiting >= size else 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream(Generic[StateT]):
    """A request in the loop. `waiting_TQ`: frames fed and not yet decoded; `known`: an earlier
    owner's samples, still to be returned.
    """

    request_id: RequestId
    state: StateT
    waiting_TQ: NDArray[np.int32]
    known: NDArray[np.float32]
    num_windows: int = 0
    walk: Walk = _BEFORE_ANY_INPUT
    ended: bool = False
    paused: bool = False
    error: FleetError | None = None

    def only_end_left(self) -> bool:
        return self.error is not None or (self.ended and not len(self.waiting_TQ))

    def replace_known(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the window's samples, with the known ones in place of the computed ones."""
        known, self.known = self.known[: len(wave)], self.known[len(wave) :]
        return np.concatenate((known, wave[len(known) :])) if len(known) else wave


class CodecEngine(Engine, Generic[StateT]):
    """Input arrays: `codes` int32 [frames, codebooks], any number of frames. Output arrays: `wave`
    float32 [samples].

    History is the `wave` of the first samples: they are returned again, and only the state needed
    to continue is computed.
    """

    def __init__(
        self, decoder: WindowDecoder[StateT], policy: WindowPolicy, *, max_batch: int
    ) -> None:
        self._decoder, self._policy = decoder, policy
        self._max_batch = 1 if policy.invariant else max_batch
        self._no_frames: NDArray[np.int32] = np.zeros((0, decoder.num_codebooks), np.int32)
        # Least recently served first.
        self._streams: dict[RequestId, _Stream[StateT]] = {}

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: BadInput if it is in the loop already."""
        if request.request_id in self._streams:
            raise BadInput(f"request {request.request_id} was submitted twice")
        known = request.history.get("wave", np.zeros(0, np.float32))
        self._streams[request.request_id] = _Stream(
            request_id=request.request_id,
            state=self._decoder.open(),
            waiting_TQ=self._no_frames,
            known=known,
        )

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        stream = self._streams.get(request_id)
        if stream is None:
            return 0
        assert not stream.ended, "input after the final one"
        stream.walk, stream.ended = piece.walk, piece.final
        try:
            stream.waiting_TQ = np.concatenate((stream.waiting_TQ, self._frames(piece.arrays)))
        except EngineError as error:
            stream.error = error
        return 0

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.paused = paused

    def is_ready(self) -> bool:
        return any(self._can_step(stream) for stream in self._streams.values())

    def step(self) -> Sequence[EngineOutput]:
        able = [stream for stream in self._streams.values() if self._can_step(stream)]
        outputs = [self._end(stream) for stream in able if stream.only_end_left()]
        windows = [stream for stream in able if not stream.only_end_left()]
        if windows:
            kind = self._kind(windows[0])
            outputs += self._run(
                [stream for stream in windows if self._kind(stream) == kind][: self._max_batch]
            )
        return outputs

    def finish(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)

    def abort(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)

    def check(self) -> None:
        self._decoder.check()

    def stats(self) -> EngineStats:
        ready = sum(self._can_step(stream) for stream in self._streams.values())
        return EngineStats(running=len(self._streams), ready=ready)

    def _frames(self, arrays: Arrays) -> NDArray[np.int32]:
        """Return the frames of an input. Raises: EngineError naming the invalid codes."""
        codes = arrays.get("codes", self._no_frames)
        num_codebooks, codebook_size = self._decoder.num_codebooks, self._decoder.codebook_size
        if (
            codes.ndim != 2
            or codes.shape[1] != num_codebooks
            or not np.issubdtype(codes.dtype, np.integer)
        ):
            got = f"{codes.dtype} {list(codes.shape)}"
            raise EngineError(
                f"codes: expected integers [frames, {num_codebooks}], got {got}", param="codes"
            )
        outside = np.argwhere((codes < 0) | (codes >= codebook_size))
        if len(outside):
            frame, codebook = outside[0]
            place = f"frame {frame} of the chunk, codebook {codebook}"
            raise EngineError(
                f"codes: {codes[frame, codebook]} at {place} is not in 0..{codebook_size - 1}",
                param="codes",
            )
        return codes.astype(np.int32, copy=False)

    def _window_frames(self, stream: _Stream[StateT]) -> int:
        return self._policy.num_frames(
            stream.num_windows, len(stream.waiting_TQ), ended=stream.ended
        )

    def _can_step(self, stream: _Stream[StateT]) -> bool:
        return not stream.paused and (stream.only_end_left() or self._window_frames(stream) > 0)

    def _kind(self, stream: _Stream[StateT]) -> Hashable:
        return (
            self._window_frames(stream),
            self._decoder.group(stream.state),
            self._is_known(stream),
        )

    def _is_known(self, stream: _Stream[StateT]) -> bool:
        """Return True if the next window's audio is known, and enough after it for the state to
        settle.
        """
        num_samples = self._decoder.num_samples(stream.state, self._window_frames(stream))
        return len(stream.known) >= num_samples + self._decoder.settling_samples

    def _run(self, batch: list[_Stream[StateT]]) -> list[EngineOutput]:
        """Run one pass over windows of one kind; if it fails, run each alone, so that only the one
        at fault fails.
        """
        num_frames = self._window_frames(batch[0])
        try:
            codes_BTQ = np.stack([stream.waiting_TQ[:num_frames] for stream in batch])
            states, waves = self._pass(
                [stream.state for stream in batch], codes_BTQ, known=self._is_known(batch[0])
            )
        except (RuntimeError, MemoryError) as error:
            log.exception("a pass over %d windows of %d frames failed", len(batch), num_frames)
            if len(batch) > 1:
                return [output for stream in batch for output in self._run([stream])]
            batch[0].error = failure_of(f"decoding a window of {num_frames} frames failed", error)
            return [self._end(batch[0])]
        return [self._advance(*row, num_frames) for row in zip(batch, states, waves, strict=True)]

    def _pass(
        self, states: Sequence[StateT], codes_BTQ: NDArray[np.int32], *, known: bool
    ) -> tuple[Sequence[StateT], Sequence[NDArray[np.float32]]]:
        if not known:
            after, waves_BT = self._decoder.decode(states, codes_BTQ)
            return after, list(waves_BT)
        lengths = [self._decoder.num_samples(state, codes_BTQ.shape[1]) for state in states]
        return self._decoder.skip(states, codes_BTQ), [
            np.zeros(length, np.float32) for length in lengths
        ]

    def _advance(
        self, stream: _Stream[StateT], state: StateT, wave: NDArray[np.float32], num_frames: int
    ) -> EngineOutput:
        stream.state, stream.waiting_TQ = state, stream.waiting_TQ[num_frames:]
        stream.num_windows += 1
        del self._streams[stream.request_id]
        final = stream.only_end_left()
        if not final:
            self._streams[stream.request_id] = stream
        arrays = {"wave": stream.replace_known(wave)}
        return EngineOutput(
            request_id=stream.request_id, walk=stream.walk, arrays=arrays, final=final
        )

    def _end(self, stream: _Stream[StateT]) -> EngineOutput:
        """Return the last output of a stream without frames to decode: its error, or an empty
        end.
        """
        del self._streams[stream.request_id]
        final = stream.error is None
        return EngineOutput(
            request_id=stream.request_id, walk=stream.walk, final=final, error=stream.error
        )
