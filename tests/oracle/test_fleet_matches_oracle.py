"""A fleet with real Redis, scripts and worker loops compared with `transformers`, token by token
and frame by frame.

Each deployment (walks driven by producer or conductor, chunks or all at the end, prompts in pieces
of 1, 7 or whole, eight concurrent requests or one by one) must give the results of single
`generate()` calls, byte-equal in `invariant` numerics.
"""

from collections.abc import Generator, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.harness import thread_fleet
from tests.oracle.fleet_answers import TORCH, SpokenAnswer, ask, assert_matches
from tests.oracle.oracle import OracleAnswer

WAYS = {
    "as configured": (),
    "everything at the end": ("async_chunk=false",),
    "walks driven by the conductor": ("transition_source=conductor",),
    "prompts one position at a time": (
        "stages.thinker.prefill_chunk_tokens=1",
        "stages.talker.prefill_chunk_tokens=1",
    ),
    "prompts seven at a time": (
        "stages.thinker.prefill_chunk_tokens=7",
        "stages.talker.prefill_chunk_tokens=7",
    ),
}

SAMPLED_WAYS = ("as configured", "prompts one position at a time")
"""Deployments tested with sampling in an ordinary run; the others only with `--thorough`."""


@pytest.mark.one_in(2, "deployments")
@pytest.mark.parametrize("way", WAYS)
async def test_eight_concurrent_requests_match_single_generate_calls(
    redis_url: str, tiny_checkpoint: Path, truth: Mapping[str, OracleAnswer], way: str
) -> None:
    with thread_fleet(redis_url, *TORCH, *WAYS[way], checkpoint=tiny_checkpoint) as fleet:
        assert_matches(await ask(fleet, tiny_checkpoint, concurrently=True), truth)


async def test_sequential_requests_match_single_generate_calls(
    redis_url: str, tiny_checkpoint: Path, truth: Mapping[str, OracleAnswer]
) -> None:
    with thread_fleet(redis_url, *TORCH, checkpoint=tiny_checkpoint) as fleet:
        assert_matches(await ask(fleet, tiny_checkpoint, concurrently=False), truth)


@pytest.fixture(scope="module")
def undisturbed() -> Generator[dict[float, dict[str, SpokenAnswer]]]:
    """The first answers in invariant numerics, by temperature, for comparison with later ones."""
    yield {}


@pytest.mark.one_in(3, "invariant deployments")
@pytest.mark.parametrize(
    ("way", "temperature"),
    [
        *((way, 0.0) for way in WAYS),
        *((way, 0.9) for way in SAMPLED_WAYS),
        *(
            pytest.param(way, 0.9, marks=pytest.mark.thorough)
            for way in WAYS
            if way not in SAMPLED_WAYS
        ),
    ],
)
async def test_invariant_numerics_are_byte_equal_in_every_deployment(
    redis_url: str,
    tiny_checkpoint: Path,
    truth: Mapping[str, OracleAnswer],
    undisturbed: dict[float, dict[str, SpokenAnswer]],
    way: str,
    temperature: float,
) -> None:
    overrides = (*TORCH, "numerics=invariant", *WAYS[way])
    with thread_fleet(redis_url, *overrides, checkpoint=tiny_checkpoint) as fleet:
        got = await ask(
            fleet, tiny_checkpoint, concurrently=way != "as configured", temperature=temperature
        )
    first = undisturbed.setdefault(temperature, got)
    for name, spoken in first.items():
        np.testing.assert_array_equal(got[name].ids, spoken.ids, err_msg=name)
        np.testing.assert_array_equal(got[name].codes, spoken.codes, err_msg=name)
        assert got[name].pcm.tobytes() == spoken.pcm.tobytes(), name
    if temperature == 0:
        assert_matches(got, truth)
