"""The batch loop of a stateful audio decoder: frames of codes in, samples out, window by window.

A step decodes one window of each of several requests, all of equal length. Windows of different
lengths are decoded in different steps, since on a CPU padding costs more than a further step. Knows
no model: the decoder defines states, and which windows may share a step.
"""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import ConfigError, EngineError, failure_of
from fleet.core.ids import RequestId
from fleet.engine.base import Arrays, EngineOutput, EngineRequest
from fleet.engine.turns import RequestStream, TurnsEngine
from fleet.engine.unread import UnreadPieces

log = logging.getLogger(__name__)
StateT = TypeVar("StateT")


class WindowDecoder(Protocol[StateT]):
    """Model behind the loop, which decodes windows of codec frames to audio. A state is immutable,
    so a failed call changes no state.
    """

    @property
    def num_codebooks(self) -> int: ...

    @property
    def codebook_size(self) -> int: ...

    def open(self) -> StateT:
        """Return a request's state before its first frame."""
        ...

    @property
    def settling_samples(self) -> int:
        """Number of samples that `decode` does not compute exactly after a window passed to `skip`,
        because the decoder's state has to settle.
        """
        ...

    def group(self, state: StateT) -> Hashable:
        """Return the group of a state: only states of the same group may be decoded in one call."""
        ...

    def num_samples(self, state: StateT, num_frames: int) -> int:
        """Return the number of samples that a window of `num_frames` yields."""
        ...

    def skip(self, states: Sequence[StateT], codes_BTQ: NDArray[np.int32]) -> Sequence[StateT]:
        """Return the states after windows whose audio is known already, without decoding them: one
        call, much cheaper than `decode`.
        """
        ...

    def decode(
        self, states: Sequence[StateT], codes_BTQ: NDArray[np.int32]
    ) -> tuple[Sequence[StateT], NDArray[np.float32]]:
        """Decode B windows of T frames, one per state; return the next states, and the audio
        samples, float32 [B, samples].
        """
        ...

    def check(self) -> None:
        """Raise EngineStopped if every computation on the decoder's device fails."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy:
    """Rule for the sizes of windows. `ramp`: number of frames of each window, from the first on;
    the last number repeats.

    `invariant`: if True, window k has ramp[k] frames however they arrive, and waits until it is
    full or the input has ended; windows are decoded one at a time. If False, a window is all frames
    that have arrived, at most the largest number of the ramp, so that no request starves.
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
        """Return the number of frames of the next window; 0 while it must wait for more input.
        `num_waiting`: number of frames that have arrived and are not decoded; `ended`: True if the
        input is complete.
        """
        if not self.invariant:
            return min(num_waiting, max(self.ramp))
        size = self.ramp[min(window_index, len(self.ramp) - 1)]
        return min(num_waiting, size) if ended or num_waiting >= size else 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream(RequestStream, Generic[StateT]):
    """State of a request in the loop. `waiting_TQ`: frames fed and not yet decoded, and `unread`
    their pieces; `known`: samples decoded by an earlier owner, still to be returned.
    """

    state: StateT
    waiting_TQ: NDArray[np.int32]
    known: NDArray[np.float32]
    num_windows: int = 0
    unread: UnreadPieces = field(default_factory=UnreadPieces)

    def only_end_left(self) -> bool:
        return self.error is not None or (self.ended and not len(self.waiting_TQ))

    def replace_known(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a decoded window `wave` with known samples in place of the decoded ones."""
        known, self.known = self.known[: len(wave)], self.known[len(wave) :]
        return np.concatenate((known, wave[len(known) :])) if len(known) else wave


class CodecEngine(TurnsEngine[_Stream[StateT]], Generic[StateT]):
    """Engine that decodes codec frames to audio. Input arrays: `codes` int32 [frames, codebooks],
    any number of frames. Output arrays: `wave` float32 [samples].

    A request's history is the `wave` of its first samples. The engine returns these samples again,
    and computes only the state needed to continue.
    """

    def __init__(
        self, decoder: WindowDecoder[StateT], policy: WindowPolicy, *, max_batch: int
    ) -> None:
        super().__init__()
        self._decoder, self._policy = decoder, policy
        self._max_batch = 1 if policy.invariant else max_batch
        self._no_frames: NDArray[np.int32] = np.zeros((0, decoder.num_codebooks), np.int32)

    def _open(self, request: EngineRequest) -> _Stream[StateT]:
        return _Stream(
            request_id=request.request_id,
            state=self._decoder.open(),
            waiting_TQ=self._no_frames,
            known=request.history.get("wave", np.zeros(0, np.float32)),
        )

    def _read(self, stream: _Stream[StateT], arrays: Arrays) -> None:
        frames_TQ = self._frames(arrays)
        stream.unread.add(len(frames_TQ))
        stream.waiting_TQ = np.concatenate((stream.waiting_TQ, frames_TQ))

    def num_unread(self, request_id: RequestId) -> int:
        stream = self._requests.get(request_id)
        if stream is None or not self._window_frames(stream):
            return 0
        return stream.unread.count(len(stream.waiting_TQ))

    def step(self) -> Sequence[EngineOutput]:
        able = self._able()
        outputs = [self._end(stream) for stream in able if stream.only_end_left()]
        windows = [stream for stream in able if not stream.only_end_left()]
        if windows:
            kind = self._kind(windows[0])
            outputs += self._run(
                [stream for stream in windows if self._kind(stream) == kind][: self._max_batch]
            )
        return outputs

    def check(self) -> None:
        self._decoder.check()

    def _frames(self, arrays: Arrays) -> NDArray[np.int32]:
        """Return the codec frames of an input, int32 [frames, codebooks]. Raises: EngineError
        naming the invalid codes.
        """
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

    def _has_work(self, stream: _Stream[StateT]) -> bool:
        return stream.only_end_left() or self._window_frames(stream) > 0

    def _kind(self, stream: _Stream[StateT]) -> Hashable:
        return (
            self._window_frames(stream),
            self._decoder.group(stream.state),
            self._is_known(stream),
        )

    def _is_known(self, stream: _Stream[StateT]) -> bool:
        """Return True if the audio of the stream's next window is known already, and enough samples
        after it for the decoder's state to settle.
        """
        num_samples = self._decoder.num_samples(stream.state, self._window_frames(stream))
        return len(stream.known) >= num_samples + self._decoder.settling_samples

    def _run(self, batch: list[_Stream[StateT]]) -> list[EngineOutput]:
        """Decode the next windows of streams that may share a step. If that fails, decode each
        window alone, so that only the faulty request fails.
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
        arrays = {"wave": stream.replace_known(wave)}
        return self._serve(stream, arrays, final=stream.only_end_left())
