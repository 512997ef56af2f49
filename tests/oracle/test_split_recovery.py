"""Recovery of tensors lost with the prefill worker that published them: the decode worker must
recompute them.
"""

from pathlib import Path

import pytest

from fleet.core.ids import EdgeName
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from tests.harness import answer, answer_disturbed, assert_same, gateway, in_step, thread_fleet
from tests.oracle.cases import AUDIO, CASES, make_frontend, spec_of
from tests.storm import assert_nothing_left

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

WAYS = (
    "engine=torch",
    "device=cpu",
    "dtype=float32",
    "numerics=invariant",
    "lease.worker_ttl_s=60",
    "stages.thinker.split.prefill.replicas=1",
    "stages.thinker.split.decode.replicas=1",
    *in_step(QWEN3_OMNI),
)
CASE = next(case for case in CASES if case.name == "audio")


async def test_rows_lost_with_the_prefill_half_are_recomputed(
    redis_url: str, tiny_checkpoint: Path
) -> None:
    """Hidden states lost with the prefill worker are recomputed: the Talker must read the prompt's
    rows again while the Thinker, which imported their blocks, is still running and out of credit.
    """
    frontend = make_frontend(tiny_checkpoint)
    with thread_fleet(redis_url, *WAYS, checkpoint=tiny_checkpoint, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, *spec_of(CASE, frontend))
            spec, blob = spec_of(CASE, frontend)

            def kill(edge: EdgeName, index: int) -> None:
                if (edge, index) != (AUDIO, 1):
                    return
                thinking = fleet.owner(spec.id, THINKER)
                assert (
                    thinking.role == f"{THINKER}.decode" and not thinking.tasks[spec.id].all_ended()
                )
                source = next(loop for loop in fleet.loops if loop.role == f"{THINKER}.prefill")
                assert source.transfer.used_slots(), "the rows are pulled, not inline"
                talking = fleet.owner(spec.id, TALKER)
                fleet.add_worker(TALKER)
                fleet.add_worker(source.role)
                fleet.kill(source)
                fleet.kill(talking)

            assert_same(await answer_disturbed(client, spec, blob, kill), expected)
        fleet.loops = [loop for loop in fleet.loops if loop.worker not in fleet.killed]
        assert_nothing_left(fleet)
