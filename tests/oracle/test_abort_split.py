"""Aborts of real models in split stages: all KV pages return to their pools, and later requests are
answered.
"""

import random
from pathlib import Path

import pytest

from fleet.engine.torch import kv_transfer
from fleet.graphs.qwen3_omni import QWEN3_OMNI
from tests.harness import answer, assert_same, gateway, in_step, thread_fleet
from tests.oracle.cases import CASES, make_frontend, spec_of
from tests.storm import Storm, assert_nothing_left
from tests.support import REPO

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

WAYS = (
    "engine=torch",
    "device=cpu",
    "dtype=float32",
    "numerics=invariant",
    "lease.worker_ttl_s=60",
    *in_step(QWEN3_OMNI),
)
"""Settings with so few credits that a request is still running at any abort."""
KINDS = ("text", "audio", "three turns", "other voice", "text outlasts speech")
ASKED = [case for case in CASES if case.name in KINDS]
NUM_ABORTS, AT_ONCE, MOST_TURNS = 20, 10, 12


@pytest.mark.one_in(2, "split aborts")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("split", "way"),
    [("thinker_pd", "lent"), ("talker_pd", "lent"), ("both_pd", "lent"), ("both_pd", "copied")],
)
async def test_many_aborts_leave_nothing_in_use(
    redis_url: str,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_aborts: int | None,
    split: str,
    way: str,
) -> None:
    """Many aborts leave nothing in use. `--aborts 1000` lengthens the test."""
    if way == "copied":
        monkeypatch.setattr(kv_transfer, "LENDING_SHARE", 1.0)
    file, frontend = REPO / "configs" / f"{split}.yaml", make_frontend(tiny_checkpoint)
    with thread_fleet(
        redis_url, *WAYS, file=file, checkpoint=tiny_checkpoint, transfer="nixl"
    ) as fleet:
        storm = Storm(fleet, random.Random(13))
        async with gateway(fleet) as client:
            expected = await answer(client, *spec_of(ASKED[0], frontend))
            asked = [
                spec_of(ASKED[n % len(ASKED)], frontend) for n in range(num_aborts or NUM_ABORTS)
            ]
            aborted = await storm.run(client, asked, concurrency=AT_ONCE, most_turns=MOST_TURNS)
            assert aborted > len(asked) // 2
            assert_same(await answer(client, *spec_of(ASKED[0], frontend)), expected)
        assert_nothing_left(fleet)
        print(f"\n{aborted} aborts met {dict(storm.met)}")
