"""Where a stage's prefill and decode are split, an abort reaches a hand-off in whatever state it is, and frees both its ends."""

import random

import pytest

from fleet.control import keys
from fleet.control.connect import text
from fleet.core.ids import StageName
from fleet.graphs.qwen3_omni import QWEN3_OMNI as OMNI
from tests.harness import ThreadFleet, answer, assert_same, fake_spec, gateway, in_step, thread_fleet
from tests.storm import Storm, assert_nothing_left
from tests.support import REPO, wait_until

SPLITS = ("thinker_pd", "talker_pd", "both_pd")
ENDLESS = 100_000
NUM_ABORTS, AT_ONCE, MOST_TURNS = 350, 32, 12
"""In each split. A request's first turns are its claims and hand-offs; later ones fall into its decode."""
UNHURRIED = (f"limits.max_requests={AT_ONCE}", "lease.worker_ttl_s=60")
"""A gateway on a busy machine may be late with its lease, which is not what is tested here."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("split", SPLITS)
async def test_concurrent_aborts_of_split_stages_leave_no_tasks_or_keys(
    redis_url: str, num_aborts: int | None, split: str
) -> None:
    """`--aborts 1000` makes it longer."""
    file = REPO / "configs" / f"{split}.yaml"
    with thread_fleet(redis_url, *UNHURRIED, *in_step(OMNI, 8), file=file, transfer="nixl") as fleet:
        storm = Storm(fleet, random.Random(11))
        async with gateway(fleet) as client:
            expected = await answer(client, fake_spec(fleet))
            asked = [(fake_spec(fleet, num_tokens=ENDLESS, seed=n), None) for n in range(num_aborts or NUM_ABORTS)]
            assert await storm.run(client, asked, concurrency=AT_ONCE, most_turns=MOST_TURNS) == len(asked)
            assert {"claim", "append", "hand_off", "confirm"} <= storm.met.keys()
            assert_same(await answer(client, fake_spec(fleet)), expected)
        assert_nothing_left(fleet)
        print(f"\n{len(asked)} aborts met {dict(storm.met)}")


def close_to_grants(fleet: ThreadFleet, role: str) -> None:
    """The role's worker takes nothing more, and keeps its lease: its grants wait."""
    loop = next(loop for loop in fleet.loops if loop.role == role)
    loop.availability.draining, before = True, loop.maintenance.vitals
    wait_until(lambda: loop.maintenance.vitals is not before, "its last read of grants to be over")


async def test_unimported_blocks_are_freed_with_their_request(redis_url: str) -> None:
    with thread_fleet(redis_url, *UNHURRIED, file=REPO / "configs" / "thinker_pd.yaml", transfer="nixl") as fleet:
        source = next(loop for loop in fleet.loops if loop.role == "thinker.prefill")
        close_to_grants(fleet, "thinker.decode")
        async with gateway(fleet) as client:
            stream = await client.requests.submit(fake_spec(fleet, num_tokens=ENDLESS), None)
            offer = keys.kv(stream.request_id, StageName("thinker"))
            wait_until(lambda: text(fleet.clients[0].hget(offer, "state")) == "offered", "an offer")
            wait_until(lambda: source.maintenance.vitals["slots_used"] == 1, "the source to hold the blocks")
            await stream.abort("the client left")
        assert_nothing_left(fleet)
