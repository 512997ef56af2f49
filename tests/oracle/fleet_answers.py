"""Answers of a fleet to the oracle's cases, received through a gateway: tokens, code frames and
audio samples.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import redis.asyncio
from numpy.typing import NDArray

from fleet.control import keys
from fleet.core.chunk import decode_chunk
from fleet.core.ids import RequestId
from tests.harness import ThreadFleet, answer, gateway
from tests.oracle.cases import (
    AUDIO,
    CASES,
    CODES,
    OF_GENERATE,
    TEXT,
    Case,
    Samplings,
    make_frontend,
    pcm16,
    spec_of,
)
from tests.oracle.oracle import OracleAnswer

TORCH = ("engine=torch", "device=cpu", "dtype=float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenAnswer:
    """A fleet's answer: text, codes and audio samples. Shapes: `codes` [frames, codebooks]."""

    ids: NDArray[np.int32]
    codes: NDArray[np.int32]
    pcm: NDArray[np.int16]


async def ask(
    fleet: ThreadFleet,
    checkpoint: Path,
    *,
    concurrently: bool,
    temperature: float | None = 0.0,
    seed: int = 11,
    cases: Sequence[Case] = CASES,
    sampling: Samplings = OF_GENERATE,
) -> dict[str, SpokenAnswer]:
    """Return the running fleet's answer to every case, by case name."""
    frontend = make_frontend(checkpoint)
    async with gateway(fleet) as client:

        async def one(case: Case) -> SpokenAnswer:
            spec, blob = spec_of(
                case, frontend, temperature=temperature, seed=seed, sampling=sampling
            )
            got = await answer(client, spec, blob)
            return SpokenAnswer(
                ids=got[TEXT],
                codes=await codes_of(fleet.url, spec.id),
                pcm=got[AUDIO].astype(np.int16),
            )

        if concurrently:
            answers = await asyncio.gather(*(one(case) for case in cases))
            return {case.name: spoken for case, spoken in zip(cases, answers, strict=True)}
        return {case.name: await one(case) for case in cases}


async def codes_of(url: str, request: RequestId) -> NDArray[np.int32]:
    """Return the code frames of a request from the log of its codes edge."""
    async with redis.asyncio.Redis.from_url(url) as client:
        entries = cast(
            "list[tuple[bytes, dict[bytes, bytes]]]", await client.xrange(keys.edge(request, CODES))
        )
    frames = [
        np.frombuffer(tensor.data or b"", np.int32).reshape(tensor.shape)
        for _, fields in entries
        for tensor in decode_chunk(fields[b"h"]).tensors.values()
    ]
    return np.concatenate(frames) if frames else np.empty((0, 0), np.int32)


def assert_matches(got: Mapping[str, SpokenAnswer], truth: Mapping[str, OracleAnswer]) -> None:
    for name, want in truth.items():
        assert got[name].ids.tolist() == want.token_ids, f"{name}: answer tokens"
        assert got[name].codes.T.tolist() == want.codes.tolist() or not want.codes.size, (
            f"{name}: code frames"
        )
        assert len(got[name].codes) == want.codes.shape[1], f"{name}: number of frames"
        assert len(got[name].pcm) == len(want.wave), f"{name}: number of samples"
        difference = np.abs(got[name].pcm.astype(np.int32) - pcm16(want.wave))
        assert difference.max(initial=0) <= 1, (
            f"{name}: samples differ by more than one step of 16 bits"
        )
