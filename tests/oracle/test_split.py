"""Prefill and decode by separate workers: in `invariant` numerics byte-equal to one worker for both
roles.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fleet.core.ids import EdgeName, StageName
from fleet.engine.torch import kv_transfer
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from fleet.worker.task.hand_off import ImportState, KVImport
from tests.harness import (
    ThreadFleet,
    answer,
    answer_disturbed,
    assert_same,
    gateway,
    held,
    in_step,
    thread_fleet,
)
from tests.oracle.cases import AUDIO, CASES, make_frontend, spec_of
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(6, "engines")

TORCH = ("engine=torch", "device=cpu", "dtype=float32", "numerics=invariant")
THINKER_PD = ("stages.thinker.split.prefill.replicas=1", "stages.thinker.split.decode.replicas=1")
TALKER_PD = ("stages.talker.split.prefill.replicas=1", "stages.talker.split.decode.replicas=1")
SPLITS = {"thinker_pd": THINKER_PD, "talker_pd": TALKER_PD, "both_pd": (*THINKER_PD, *TALKER_PD)}
KINDS = ("audio", "three turns", "one token", "text outlasts speech", "speech outlasts text")
ASKED = [case for case in CASES if case.name in KINDS]
Answers = dict[str, Mapping[EdgeName, np.ndarray]]


async def ask_all(fleet: ThreadFleet, checkpoint: Path, temperature: float) -> Answers:
    """Run all cases concurrently, so that hand-offs of some requests overlap with batches of
    others.
    """
    frontend = make_frontend(checkpoint)
    async with gateway(fleet) as client:
        specs = [spec_of(case, frontend, temperature=temperature, seed=5) for case in ASKED]
        answers = await asyncio.gather(*(answer(client, *spec) for spec in specs))
    return {case.name: got for case, got in zip(ASKED, answers, strict=True)}


@pytest.fixture(scope="module")
def colocated() -> dict[float, Answers]:
    return {}


async def undisturbed(
    known: dict[float, Answers], url: str, checkpoint: Path, temperature: float
) -> Answers:
    if temperature not in known:
        with thread_fleet(url, *TORCH, checkpoint=checkpoint) as fleet:
            known[temperature] = await ask_all(fleet, checkpoint, temperature)
    return known[temperature]


def assert_clean(fleet: ThreadFleet) -> None:
    wait_until(lambda: not held(fleet), "workers to hold nothing")
    wait_until(
        lambda: all(loop.transfer.used_slots() == 0 for loop in fleet.loops), "arenas to be empty"
    )
    wait_until(
        lambda: all(loop.engine.stats().kv.pages_used == 0 for loop in fleet.loops),
        "pools to be empty",
    )


@pytest.mark.one_in(3, "splits")
@pytest.mark.parametrize("way", ["lent", "copied"])
@pytest.mark.parametrize(
    ("split", "temperature", "transfer"),
    [
        ("thinker_pd", 0.0, "nixl"),
        ("talker_pd", 0.0, "nixl"),
        ("both_pd", 0.9, "nixl"),
        ("both_pd", 0.0, "redis"),
    ],
)
async def test_split_stages_give_the_answers_of_whole_ones(
    redis_url: str,
    tiny_checkpoint: Path,
    colocated: dict[float, Answers],
    monkeypatch: pytest.MonkeyPatch,
    split: str,
    temperature: float,
    transfer: str,
    way: str,
) -> None:
    """Split stages give the answers of whole ones. Pages are lent in place or, if the pool is
    short, copied (the slower way).
    """
    if way == "copied":
        monkeypatch.setattr(kv_transfer, "LENDING_SHARE", 1.0)
    expected = await undisturbed(colocated, redis_url, tiny_checkpoint, temperature)
    with thread_fleet(
        redis_url, *TORCH, *SPLITS[split], checkpoint=tiny_checkpoint, transfer=transfer
    ) as fleet:
        got = await ask_all(fleet, tiny_checkpoint, temperature)
        for name, want in expected.items():
            assert_same(got[name], want)
        assert_clean(fleet)


@pytest.mark.parametrize("transfer", ["nixl", "redis"])
async def test_hand_off_timings_are_recorded(
    redis_url: str, tiny_checkpoint: Path, transfer: str
) -> None:
    """Hand-off timings are recorded: the trace has the timings of each stage that was handed
    off.
    """
    frontend = make_frontend(tiny_checkpoint)
    case = next(case for case in CASES if case.name == "audio")
    with thread_fleet(
        redis_url, *TORCH, *THINKER_PD, checkpoint=tiny_checkpoint, transfer=transfer
    ) as fleet:
        async with gateway(fleet) as client:
            spec, blob = spec_of(case, frontend)
            await answer(client, spec, blob)
            view = await client.telemetry.trace(spec.id)
    assert view is not None
    hand_offs = {task.stage: task.hand_off for task in view.tasks}
    assert [stage for stage, hand_off in hand_offs.items() if hand_off is not None] == [THINKER]
    way = hand_offs[StageName(THINKER)]
    assert (
        way is not None
        and way.pulled_us is not None
        and way.confirmed_us is not None
        and way.resumed_us is not None
    )
    # The data of an offer without NIXL comes with the logs, so before the task is open.
    moments = [
        way.prefilled_us,
        way.handed_us,
        way.claimed_us,
        way.opened_us,
        way.pulled_us,
        way.confirmed_us,
        way.resumed_us,
    ]
    assert moments == sorted(moments)


async def test_failed_import_changes_no_answer(
    redis_url: str,
    tiny_checkpoint: Path,
    colocated: dict[float, Answers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(adoption: KVImport) -> None:
        if adoption.state is ImportState.PULLING:
            adoption.enter(ImportState.FAILED)

    monkeypatch.setattr(KVImport, "poll", fail)
    expected = await undisturbed(colocated, redis_url, tiny_checkpoint, 0.0)
    with thread_fleet(
        redis_url, *TORCH, *SPLITS["both_pd"], checkpoint=tiny_checkpoint, transfer="nixl"
    ) as fleet:
        got = await ask_all(fleet, tiny_checkpoint, 0.0)
    for name, want in expected.items():
        assert_same(got[name], want)


@pytest.mark.parametrize("stage", [THINKER, TALKER])
async def test_killed_half_is_replaced_by_a_worker_of_its_role(
    redis_url: str, tiny_checkpoint: Path, stage: str
) -> None:
    frontend = make_frontend(tiny_checkpoint)
    case = next(case for case in CASES if case.name == "audio")
    ways = (*TORCH, *SPLITS["both_pd"], *in_step(QWEN3_OMNI))
    with thread_fleet(redis_url, *ways, checkpoint=tiny_checkpoint, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            expected = await answer(client, *spec_of(case, frontend))
            spec, blob = spec_of(case, frontend)

            def kill(edge: EdgeName, index: int) -> None:
                if edge == AUDIO and index in (0, 1):
                    dying = fleet.owner(spec.id, stage)  # type: ignore[arg-type]
                    assert dying.role == f"{stage}.decode"
                    fleet.add_worker(dying.role)
                    fleet.kill(dying)

            assert_same(await answer_disturbed(client, spec, blob, kill), expected)
