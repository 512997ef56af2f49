"""Scheduling of the codec batch loop: batches, waiting and failures, with a decoder that only
counts.
"""

import gc
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.core.errors import ConfigError, OutOfMemory
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.codec import CodecEngine, WindowPolicy

A, B, C = (RequestId(name) for name in "abc")
POISON = 7


@dataclass(frozen=True, weakref_slot=True, slots=True)
class Count:
    frames: int = 0


@dataclass(slots=True)
class Counter:
    """Decoder that turns a frame into one sample, its code. Records the shape of every call, and
    fails on a poisoned window.
    """

    num_codebooks: int = 1
    codebook_size: int = 8
    settling_samples: int = 3
    error: Exception = field(default_factory=lambda: RuntimeError("poisoned"))
    passes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    skipped: list[int] = field(default_factory=list[int])
    states: "list[weakref.ref[Count]]" = field(default_factory=lambda: [])

    def open(self) -> Count:
        return self._made(Count())

    def num_samples(self, state: Count, num_frames: int) -> int:
        return num_frames

    def skip(self, states: Sequence[Count], codes_BTQ: NDArray[np.int32]) -> list[Count]:
        self.skipped += [codes_BTQ.shape[1]] * len(states)
        return [self._made(Count(state.frames + codes_BTQ.shape[1])) for state in states]

    def check(self) -> None:
        """Do nothing, since the double has no device."""

    def group(self, state: Count) -> Hashable:
        return state.frames == 0

    def decode(
        self, states: Sequence[Count], codes_BTQ: NDArray[np.int32]
    ) -> tuple[list[Count], NDArray[np.float32]]:
        if (codes_BTQ == POISON).any():
            raise self.error
        self.passes.append(codes_BTQ.shape[:2])
        after = [self._made(Count(state.frames + codes_BTQ.shape[1])) for state in states]
        return after, codes_BTQ[..., 0].astype(np.float32)

    def _made(self, state: Count) -> Count:
        self.states.append(weakref.ref(state))
        return state


def make(
    *requests: RequestId,
    ramp: tuple[int, ...] = (2, 4),
    invariant: bool = False,
    max_batch: int = 16,
):
    decoder = Counter()
    engine = CodecEngine(decoder, WindowPolicy(ramp=ramp, invariant=invariant), max_batch=max_batch)
    for request_id in requests:
        engine.submit(EngineRequest(request_id=request_id, sampling=Sampling()))
    return engine, decoder


def feed(
    engine: CodecEngine[Count], request_id: RequestId, *codes: int, final: bool = False
) -> None:
    array = np.array(codes, np.int32).reshape(-1, 1)
    engine.feed(request_id, EngineInput(walk=Walk("decode"), arrays={"codes": array}, final=final))


def drain(engine: CodecEngine[Count]) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.is_ready():
        outputs += engine.step()
    return outputs


def samples(outputs: Sequence[EngineOutput], request_id: RequestId) -> list[float]:
    mine = [
        output.arrays["wave"]
        for output in outputs
        if output.request_id == request_id and output.arrays
    ]
    return np.concatenate(mine).tolist() if mine else []


def test_only_windows_of_equal_length_share_a_pass() -> None:
    engine, decoder = make(A, B, C)
    feed(engine, A, 1, 2)
    feed(engine, B, 3)
    feed(engine, C, 4, 5)
    assert [output.request_id for output in engine.step()] == [A, C]
    assert [output.request_id for output in engine.step()] == [B]
    assert decoder.passes == [(2, 2), (1, 1)]


def test_window_is_bounded_so_that_long_answers_delay_no_other() -> None:
    engine, decoder = make(A, B)
    feed(engine, A, *[1] * 20, final=True)
    engine.step()
    feed(engine, B, 2)
    served = [output.request_id for output in drain(engine)]
    assert max(frames for _, frames in decoder.passes) == 4
    assert served.index(B) <= 1


def test_pass_runs_at_most_max_batch_requests() -> None:
    engine, decoder = make(A, B, C, max_batch=2)
    for request_id in (A, B, C):
        feed(engine, request_id, 1)
    drain(engine)
    assert decoder.passes == [(2, 1), (1, 1)]


def test_invariant_window_waits_until_full_or_input_ends() -> None:
    engine, decoder = make(A, B, invariant=True)
    feed(engine, A, 1)
    feed(engine, B, 1, 1)
    assert engine.stats().ready == 1
    outputs = drain(engine)
    feed(engine, A, 2, 3, 4, 5)
    outputs += drain(engine)
    assert decoder.passes == [(1, 2), (1, 2)]
    feed(engine, A, 6, 0, 1, final=True)
    outputs += drain(engine)
    assert decoder.passes[2:] == [(1, 4), (1, 2)]
    assert samples(outputs, A) == [1, 2, 3, 4, 5, 6, 0, 1]
    assert outputs[-1].final


def test_failing_window_ends_its_own_request_only() -> None:
    engine, decoder = make(A, B, C)
    for request_id, code in ((A, 1), (B, POISON), (C, 3)):
        feed(engine, request_id, code, final=True)
    outputs = {output.request_id: output for output in drain(engine)}
    assert str(outputs[B].error) == "decoding a window of 1 frames failed: poisoned"
    assert (outputs[B].final, outputs[A].final, outputs[C].final) == (False, True, True)
    assert decoder.passes == [(1, 1), (1, 1)]
    assert engine.stats().running == 0


def test_window_without_memory_ends_its_own_request_with_a_remedy() -> None:
    engine, decoder = make(A, B)
    decoder.error = MemoryError("Unable to allocate 8.00 EiB")
    feed(engine, A, POISON, final=True)
    feed(engine, B, 3, final=True)
    outputs = {output.request_id: output for output in drain(engine)}
    assert isinstance(outputs[A].error, OutOfMemory) and "lower max_tokens" in str(outputs[A].error)
    assert outputs[B].final


@pytest.mark.parametrize(
    "array",
    [
        np.array([[8]], np.int32),
        np.array([[-1]], np.int32),
        np.zeros((1, 2), np.int32),
        np.zeros((2,), np.int32),
        np.zeros((1, 1), np.float32),
    ],
)
def test_invalid_codes_end_the_request(array: NDArray[np.int32]) -> None:
    engine, decoder = make(A)
    engine.feed(A, EngineInput(walk=Walk("decode"), arrays={"codes": array}))
    (output,) = drain(engine)
    assert output.error is not None
    assert output.error.param == "codes"
    assert not decoder.passes


def test_ended_and_aborted_requests_leave_no_state() -> None:
    engine, decoder = make(A, B, C)
    for request_id in (A, B, C):
        feed(engine, request_id, 1, final=request_id == C)
    drain(engine)
    engine.abort(A)
    engine.finish(B)
    feed(engine, A, 1)
    assert engine.stats().running == 0
    assert not engine.is_ready()
    gc.collect()
    assert not [state for state in decoder.states if state() is not None]


@pytest.mark.parametrize("ramp", [(), (2, 0)])
def test_ramp_must_have_positive_windows(ramp: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="window ramp"):
        WindowPolicy(ramp=ramp)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("num_known", [0, 1, 5, 6, 7, 10, 17, 20])
def test_known_samples_are_returned_and_only_settling_frames_decoded(
    num_known: int, invariant: bool
) -> None:
    engine, decoder = make(invariant=invariant)
    known = np.linspace(10, 20, num_known, dtype=np.float32)
    engine.submit(EngineRequest(request_id=A, sampling=Sampling(), history={"wave": known}))
    feed(engine, A, *[1, 2, 3, 4, 5] * 4, final=True)
    outputs = drain(engine)
    assert samples(outputs, A) == [*known.tolist(), *([1, 2, 3, 4, 5] * 4)[num_known:]]
    decoded = sum(frames for _, frames in decoder.passes)
    assert sum(decoder.skipped) + decoded == 20
    assert sum(decoder.skipped) <= max(0, num_known - decoder.settling_samples), (
        "so many at least are decoded before a new one"
    )
    assert not decoder.skipped or num_known - decoder.settling_samples - sum(decoder.skipped) < 4, (
        "no window more than that"
    )


def test_request_with_known_samples_shares_passes_once_it_decodes() -> None:
    engine, decoder = make(B)
    engine.submit(
        EngineRequest(request_id=A, sampling=Sampling(), history={"wave": np.zeros(8, np.float32)})
    )
    feed(engine, A, *[1] * 12)
    feed(engine, B, *[1] * 8)
    drain(engine)
    assert decoder.skipped == [4] and (2, 4) in decoder.passes
