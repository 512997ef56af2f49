"""The fleet against `transformers`: through real Redis, real scripts and the worker's own loop, token by token, frame by frame.

Each way of running it (walks driven by producer or conductor, chunks or all at the end, prompts in pieces of 1, 7 or whole, eight
requests at once or one by one) must give what single `generate()` calls give. In `invariant` numerics the bytes are the same.
"""

import asyncio
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import redis.asyncio
from numpy.typing import NDArray

from fleet.control import keys
from fleet.core.chunk import decode_chunk
from fleet.core.ids import RequestId
from tests.harness import ThreadFleet, answer, gateway, thread_fleet
from tests.oracle.cases import AUDIO, CASES, CODES, TEXT, make_frontend, pcm16, spec_of
from tests.oracle.oracle import OracleAnswer

TORCH = ("engine=torch", "device=cpu", "dtype=float32")
WAYS = {
    "as configured": (),
    "everything at the end": ("async_chunk=false",),
    "walks driven by the conductor": ("transition_source=conductor",),
    "prompts one position at a time": ("stages.thinker.prefill_chunk_tokens=1", "stages.talker.prefill_chunk_tokens=1"),
    "prompts seven at a time": ("stages.thinker.prefill_chunk_tokens=7", "stages.talker.prefill_chunk_tokens=7"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One answer of the fleet. Shapes: `codes` [frames, codebooks]."""

    ids: NDArray[np.int32]
    codes: NDArray[np.int32]
    pcm: NDArray[np.int16]


async def ask(fleet: ThreadFleet, checkpoint: Path, *, at_once: bool, temperature: float = 0.0) -> dict[str, Spoken]:
    """Every case's answer from a running fleet."""
    frontend = make_frontend(checkpoint)
    async with gateway(fleet) as client:

        async def one(name: str) -> Spoken:
            case = next(case for case in CASES if case.name == name)
            spec, blob = spec_of(case, frontend, temperature=temperature, seed=11)
            got = await answer(client, spec, blob)
            return Spoken(ids=got[TEXT], codes=await codes_of(fleet.url, spec.id), pcm=got[AUDIO].astype(np.int16))

        names = [case.name for case in CASES]
        if at_once:
            return dict(zip(names, await asyncio.gather(*(one(name) for name in names)), strict=True))
        return {name: await one(name) for name in names}


async def codes_of(url: str, request: RequestId) -> NDArray[np.int32]:
    """The code frames on the edge, as its log keeps them."""
    async with redis.asyncio.Redis.from_url(url) as client:
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", await client.xrange(keys.edge(request, CODES)))
    frames = [
        np.frombuffer(tensor.data or b"", np.int32).reshape(tensor.shape)
        for _, fields in entries
        for tensor in decode_chunk(fields[b"h"]).tensors.values()
    ]
    return np.concatenate(frames) if frames else np.empty((0, 0), np.int32)


def assert_matches(got: Mapping[str, Spoken], truth: Mapping[str, OracleAnswer]) -> None:
    for name, want in truth.items():
        assert got[name].ids.tolist() == want.token_ids, f"{name}: answer tokens"
        assert got[name].codes.T.tolist() == want.codes.tolist() or not want.codes.size, f"{name}: code frames"
        assert len(got[name].codes) == want.codes.shape[1], f"{name}: number of frames"
        assert len(got[name].pcm) == len(want.wave), f"{name}: number of samples"
        difference = np.abs(got[name].pcm.astype(np.int32) - pcm16(want.wave))
        assert difference.max(initial=0) <= 1, f"{name}: samples differ by more than one step of 16 bits"


@pytest.mark.parametrize("way", WAYS)
async def test_eight_at_once_match_single_generate_calls(
    redis_url: str, tiny_checkpoint: Path, truth: Mapping[str, OracleAnswer], way: str
) -> None:
    with thread_fleet(redis_url, *TORCH, *WAYS[way], checkpoint=tiny_checkpoint) as fleet:
        assert_matches(await ask(fleet, tiny_checkpoint, at_once=True), truth)


async def test_one_by_one_match_single_generate_calls(
    redis_url: str, tiny_checkpoint: Path, truth: Mapping[str, OracleAnswer]
) -> None:
    with thread_fleet(redis_url, *TORCH, checkpoint=tiny_checkpoint) as fleet:
        assert_matches(await ask(fleet, tiny_checkpoint, at_once=False), truth)


@pytest.fixture(scope="module")
def undisturbed() -> Generator[dict[float, dict[str, Spoken]]]:
    """The first invariant answers by temperature, for the others to be equal to."""
    yield {}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("way", WAYS)
async def test_invariant_numerics_are_byte_equal_however_they_are_run(
    redis_url: str,
    tiny_checkpoint: Path,
    truth: Mapping[str, OracleAnswer],
    undisturbed: dict[float, dict[str, Spoken]],
    way: str,
    temperature: float,
) -> None:
    overrides = (*TORCH, "numerics=invariant", *WAYS[way])
    with thread_fleet(redis_url, *overrides, checkpoint=tiny_checkpoint) as fleet:
        got = await ask(fleet, tiny_checkpoint, at_once=way != "as configured", temperature=temperature)
    first = undisturbed.setdefault(temperature, got)
    for name, spoken in first.items():
        np.testing.assert_array_equal(got[name].ids, spoken.ids, err_msg=name)
        np.testing.assert_array_equal(got[name].codes, spoken.codes, err_msg=name)
        assert got[name].pcm.tobytes() == spoken.pcm.tobytes(), name
    if temperature == 0:
        assert_matches(got, truth)
