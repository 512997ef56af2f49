"""Aborts of split stages: a request aborted in any state of a hand-off frees both ends."""

import random

import pytest

from fleet.control import keys
from fleet.control.connect import text
from fleet.core.ids import StageName
from fleet.graphs.qwen3_omni import QWEN3_OMNI as OMNI
from tests.harness import (
    answer,
    assert_same,
    fake_spec,
    gateway,
    in_step,
    stop_claims,
    thread_fleet,
)
from tests.storm import Storm, assert_nothing_left
from tests.support import REPO, wait_until

pytestmark = pytest.mark.one_file_in(3, "control with many processes")

SPLITS = ("thinker_pd", "talker_pd", "both_pd")
ENDLESS = 100_000
NUM_ABORTS, MAX_CONCURRENT, MOST_TURNS = 350, 32, 12
"""Number of aborted requests per split, number of concurrent ones, and largest number of worker
turns before an abort. A request's first turns are its claims and hand-offs; later ones fall into
its decode.
"""
LONG_LEASES = (f"limits.max_requests={MAX_CONCURRENT}", "lease.worker_ttl_s=60")
"""Settings with long leases: a gateway on a busy machine may renew late, which is not tested here.
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("split", SPLITS)
async def test_concurrent_aborts_of_split_stages_leave_no_tasks_or_keys(
    redis_url: str, num_aborts: int | None, split: str
) -> None:
    """Concurrent random aborts of requests with a split stage leave no task or key. `--aborts 1000`
    lengthens the test.
    """
    file = REPO / "configs" / f"{split}.yaml"
    with thread_fleet(
        redis_url, *LONG_LEASES, *in_step(OMNI, 8), file=file, transfer="nixl"
    ) as fleet:
        storm = Storm(fleet, random.Random(11))
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            submissions = [
                (fake_spec(fleet, num_tokens=ENDLESS, seed=n), None)
                for n in range(num_aborts or NUM_ABORTS)
            ]
            assert await storm.run(
                client, submissions, concurrency=MAX_CONCURRENT, most_turns=MOST_TURNS
            ) == len(submissions)
            assert {"claim", "append", "hand_off", "confirm"} <= storm.met.keys()
            assert_same(await answer(client, fake_spec(fleet)), expected)
        assert_nothing_left(fleet)
        print(f"\n{len(submissions)} aborts met {dict(storm.met)}")


async def test_unimported_blocks_are_freed_with_their_request(redis_url: str) -> None:
    with thread_fleet(
        redis_url, *LONG_LEASES, file=REPO / "configs" / "thinker_pd.yaml", transfer="nixl"
    ) as fleet:
        source = next(loop for loop in fleet.loops if loop.role == "thinker.prefill")
        stop_claims(next(loop for loop in fleet.loops if loop.role == "thinker.decode"))
        async with gateway(fleet) as client:
            stream = await client.requests.submit(fake_spec(fleet, num_tokens=ENDLESS), None)
            offer = keys.kv(stream.request_id, StageName("thinker"))
            wait_until(
                lambda: text(fleet.clients[0].hget(offer, "state")) == "offered",
                "the blocks to be offered",
            )
            wait_until(
                lambda: source.maintenance.vitals["slots_used"] == 1,
                "the source to hold the blocks",
            )
            await stream.abort("the client left")
        assert_nothing_left(fleet)
