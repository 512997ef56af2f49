"""The fleet of configs/spans_omni.yaml produces the speech of undivided stages, even when a span
worker is killed in mid-answer.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fleet.cli.checkpoint import resolve_checkpoint
from fleet.control.connect import connect
from fleet.core.ids import RequestId, StageName, new_request_id
from fleet.core.request import RequestSpec
from fleet.graphs.qwen3_omni import CODE2WAV, QWEN3_OMNI, TALKER, THINKER
from tests.e2e.fleets import fleet_up, owner_of, process_of
from tests.e2e.span_fleets import SpanFleet
from tests.harness import (
    EdgeArrays,
    answer,
    answer_disturbed,
    assert_same,
    gateway_at,
    in_step,
    wait_none_live,
)
from tests.oracle.cases import (
    AUDIO,
    TEXT,
    Case,
    make_frontend,
    spec_of,
    speech_like,
    user,
    wav_part,
)
from tests.oracle.twins import speaking_stages, speaking_twin
from tests.support import REPO, wait_until

pytestmark = pytest.mark.one_file_in(4, "spans of processes")

CONFIG = REPO / "configs" / "spans_omni.yaml"
CASES = (
    Case(
        name="audio",
        messages=(user("What do you hear?", wav_part(speech_like(0.9, 2))),),
        tokens=16,
        frames=61,
    ),
    Case(
        name="text",
        messages=(user("What is the opposite of hot?"),),
        tokens=16,
        frames=61,
        voice="chelsie",
    ),
)
"""Cases with answers so long that no stage has ended when its span worker is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedFleet:
    """A fleet whose stages `stages` are divided. `expected`: answers of undivided stages in one
    process, by case.
    """

    stages: dict[StageName, SpanFleet]
    specs: list[RequestSpec]
    blobs: dict[RequestId, bytes]
    expected: list[EdgeArrays] = field(default_factory=list[EdgeArrays])

    async def answers(self, disturb: Callable[[RequestId, object, int], None]) -> list[EdgeArrays]:
        """Receive the answers concurrently; `disturb` is called after each chunk of the first
        answer.
        """
        specs = [replace(spec, id=new_request_id()) for spec in self.specs]
        blobs = [self.blobs.get(spec.id) for spec in self.specs]
        up = self.stages[THINKER].up
        async with gateway_at(up.redis_url, up.config) as client:
            first = answer_disturbed(
                client, specs[0], blobs[0], lambda edge, index: disturb(specs[0].id, edge, index)
            )
            others = [
                answer(client, spec, blob) for spec, blob in zip(specs[1:], blobs[1:], strict=True)
            ]
            received = await asyncio.gather(first, *others)
            await wait_none_live(client)
        return list(received)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DividedFleet]:
    settings = ("numerics=invariant", "transfer.kind=redis", "web.port=0", *in_step(QWEN3_OMNI))
    with (
        fleet_up(
            tmp_path_factory.mktemp("omni"), *settings, options=("--config", str(CONFIG))
        ) as up,
        connect(up.redis_url) as control,
        ExitStack() as extras,
    ):
        stages = {
            stage: SpanFleet(up=up, config=up.config, control=control, extras=extras, stage=stage)
            for stage in (THINKER, TALKER)
        }
        checkpoint = resolve_checkpoint(up.config)
        asked = [
            endless(*spec_of(case, make_frontend(checkpoint), temperature=0.9, seed=5))
            for case in CASES
        ]
        blobs = {spec.id: blob for spec, blob in asked if blob is not None}
        fleet = DividedFleet(stages=stages, specs=[spec for spec, _ in asked], blobs=blobs)
        fleet.expected.extend(answers_of_whole_stages(checkpoint, fleet))
        yield fleet


def endless(spec: RequestSpec, blob: bytes | None) -> tuple[RequestSpec, bytes | None]:
    """Return the request with an answer that does not end by itself."""
    sampling = {stage: replace(own, ignore_eos=True) for stage, own in spec.sampling.items()}
    return replace(spec, sampling=sampling), blob


def answers_of_whole_stages(checkpoint: Path, fleet: DividedFleet) -> list[EdgeArrays]:
    built = speaking_stages(checkpoint, numerics="invariant", stages=(THINKER, TALKER, CODE2WAV))
    answers = speaking_twin(built).run(fleet.specs, fleet.blobs)
    names = {TEXT: "ids", AUDIO: "pcm"}
    return [
        {
            edge: np.concatenate([arrays[name] for arrays in answers[spec.id][edge]])
            for edge, name in names.items()
        }
        for spec in fleet.specs
    ]


def assert_expected(fleet: DividedFleet, received: list[EdgeArrays]) -> None:
    for got, expected in zip(received, fleet.expected, strict=True):
        assert len(got[TEXT]) == 16 and len(got[AUDIO]) > 24_000
        assert_same(got, expected)


async def test_speech_of_divided_stages_is_that_of_whole_ones(divided: DividedFleet) -> None:
    for stage in divided.stages.values():
        stage.wait_complete(1, 1)
    assert_expected(divided, await divided.answers(lambda *_: None))


@pytest.mark.parametrize(
    ("stage", "at"), [(THINKER, (TEXT, 4)), (TALKER, (AUDIO, 1))], ids=[THINKER, TALKER]
)
async def test_killed_span_worker_changes_no_sample(
    divided: DividedFleet, stage: StageName, at: tuple[object, int]
) -> None:
    """A span worker that is killed (SIGKILL) in the middle of an answer changes no audio sample."""
    fleet = divided.stages[stage]
    fleet.wait_complete(1, 1)
    (before,) = fleet.route().values()
    owners: list[str] = []

    def kill(request: RequestId, edge: object, index: int) -> None:
        if (edge, index) == at:
            owners.append(owner_of(fleet.control, request, stage)[0])
            process_of(before).kill()
            wait_until(lambda: before not in fleet.span_workers, "it to be unlisted", 60)

    assert_expected(divided, await divided.answers(kill))
    assert owners == fleet.anchors, "the anchor has kept the task, which had not ended"
    (after,) = fleet.route().values()
    assert after != before
