"""Conversations whose turns reuse the rows of earlier turns: in `invariant` numerics text and audio
are byte-equal to answers without reuse, and only new positions are computed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from fleet.control.client import FleetClient
from fleet.core.ids import EdgeName, StageName, new_request_id
from fleet.core.request import RequestSpec
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.passes import FastRunner, PassDone, TileRunner
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER, THINKER
from fleet.models.qwen3_omni.roles import HEADER_LEN
from fleet.processing.base import Message
from fleet.processing.qwen3_omni import OmniFrontend
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
from tests.oracle.cases import (
    AUDIO,
    TEXT,
    Case,
    make_frontend,
    said,
    spec_of,
    speech_like,
    user,
    wav_part,
)
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

TORCH = ("engine=torch", "device=cpu", "dtype=float32")
CHUNKS = tuple(f"stages.{stage}.prefill_chunk_tokens=16" for stage in (THINKER, TALKER))
TALK = "talk"
LONGEST_S = 2.0
TURNS: tuple[Message, ...] = (
    user("What do you hear?", wav_part(speech_like(LONGEST_S, 1))),
    user("And what colour has it?"),
    user("And now?", wav_part(speech_like(0.9, 2))),
    user("Thank you. Say it once more."),
)
Heard = Mapping[EdgeName, NDArray[np.generic]]
Entries = Sequence[tuple[object, Extent]]
Forward = Callable[[object, Entries], PassDone]


@dataclass(slots=True)
class OracleConversation:
    """A conversation with the oracle: questions and answers so far. Answers are put into the next
    prompt as they were sampled, token by token.
    """

    frontend: OmniFrontend
    temperature: float = 0.0
    messages: list[Message] = field(default_factory=list[Message])
    answers: list[list[int]] = field(default_factory=list[list[int]])

    def ask(self, message: Message) -> tuple[RequestSpec, bytes | None]:
        self.messages += [said("assistant", "")] * bool(self.messages) + [message]
        case = Case(name="turn", messages=tuple(self.messages), tokens=10, frames=12)
        spec, blob = spec_of(case, self.frontend, temperature=self.temperature, seed=7)
        return replace(spec, prompt_ids=self._with_answers(spec.prompt_ids)), blob

    def _with_answers(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Insert the answers into a prompt's ids: the prompt ends in an assistant header, and each
        earlier header is followed by its answer.
        """
        header, made, answers = list(ids[-HEADER_LEN:]), list[int](), iter(self.answers)
        for at in range(len(ids)):
            made.append(ids[at])
            if list(ids[at + 1 - HEADER_LEN : at + 1]) == header:
                made += next(answers, [])
        return tuple(made)

    def add_answer(self, got: Heard) -> None:
        self.answers.append([int(token) for token in got[TEXT]])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Number of computed rows, by class of task."""
    counts: Counter[str] = Counter()
    for runner in (FastRunner, TileRunner):
        real = cast("Forward", runner.forward)

        def counted(self: object, entries: Entries, forward: Forward = real) -> PassDone:
            for task, extent in entries:
                counts[type(task).__name__] += extent.num_rows
            return forward(self, entries)

        monkeypatch.setattr(runner, "forward", counted)
    yield counts


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleTurn:
    got: Heard
    reused: Mapping[StageName, int]
    computed: Counter[str]


async def take(
    client: FleetClient, spec: RequestSpec, blob: bytes | None, rows: Counter[str], session: str
) -> OracleTurn:
    spec = replace(spec, id=new_request_id(), session=session)
    rows.clear()
    got = await answer(client, spec, blob)
    view = await client.telemetry.trace(spec.id)
    assert view is not None
    reused = {task.stage: task.cached_rows for task in view.tasks}
    return OracleTurn(got=got, reused=reused, computed=Counter(rows))


def num_user_positions(spec: RequestSpec, frontend: OmniFrontend) -> int:
    """Return the number of positions of user turns, from each turn's start up to the next turn."""
    start, by_user = (frontend.tokenizer.token_to_id(name) for name in ("<|im_start|>", "user"))
    inside, count = False, 0
    for at, token in enumerate(spec.prompt_ids):
        inside = spec.prompt_ids[at + 1] == by_user if token == start else inside
        count += inside
    return count


def assert_only_cached_pages(fleet: ThreadFleet) -> None:
    wait_until(lambda: not held(fleet), "workers to hold nothing")
    for loop in fleet.loops:
        stats = loop.engine.stats()
        assert (stats.running, stats.kv.pages_used) == (0, stats.kv.pages_cached)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_turns_with_cached_prefix_are_byte_equal_to_those_without(
    redis_url: str, tiny_checkpoint: Path, rows: Counter[str], temperature: float
) -> None:
    talk = OracleConversation(make_frontend(tiny_checkpoint), temperature)
    with thread_fleet(
        redis_url,
        *TORCH,
        *CHUNKS,
        "numerics=invariant",
        checkpoint=tiny_checkpoint,
        transfer="nixl",
    ) as fleet:
        async with gateway(fleet) as client:
            last: RequestSpec | None = None
            for message in TURNS:
                last = await assert_turn_is_byte_equal(client, talk, message, rows, last)
            assert_only_cached_pages(fleet)


async def assert_turn_is_byte_equal(
    client: FleetClient,
    talk: OracleConversation,
    message: Message,
    rows: Counter[str],
    last: RequestSpec | None,
) -> RequestSpec:
    """Run a turn with and without its session, and compare the answers. `last`: the previous turn's
    request.
    """
    spec, blob = talk.ask(message)
    alone = await take(client, spec, blob, rows, "")
    with_session = await take(client, spec, blob, rows, TALK)
    assert_same(with_session.got, alone.got)
    assert len(alone.got[AUDIO])
    if last is not None:
        # The Thinker reuses all of the last turn but its last token, which was not computed; the
        # Talker its user turns.
        assert with_session.reused[THINKER] == len(last.prompt_ids) + len(talk.answers[-1]) - 1
        assert with_session.reused[TALKER] == num_user_positions(last, talk.frontend)
    assert alone.reused == dict.fromkeys(alone.reused, 0)
    for kind, stage in (("ThinkerTask", THINKER), ("TalkerTask", TALKER)):
        assert with_session.computed[kind] == alone.computed[kind] - with_session.reused[stage], (
            kind
        )
    talk.add_answer(alone.got)
    return spec


async def second_turn(
    client: FleetClient, talk: OracleConversation, first: Message, then: Message
) -> tuple[RequestSpec, bytes | None]:
    """Run the first turn within the session; return the request of the second turn."""
    spec, blob = talk.ask(first)
    talk.add_answer(await answer(client, replace(spec, session=TALK), blob))
    spec, blob = talk.ask(then)
    return replace(spec, session=TALK), blob


async def reused_rows(client: FleetClient, spec: RequestSpec, stage: StageName) -> int:
    view = await client.telemetry.trace(spec.id)
    assert view is not None
    return next(task.cached_rows for task in view.tasks if task.stage == stage)


def first_audio(spec: RequestSpec, frontend: OmniFrontend) -> int:
    return spec.prompt_ids.index(frontend._audio_id)  # pyright: ignore[reportPrivateUsage]


async def test_turn_continues_without_its_prefix_after_worker_deaths(
    redis_url: str, tiny_checkpoint: Path
) -> None:
    """A turn continues without its cached prefix after worker deaths: the new owners compute all
    rows, and match them with a log whose first rows were reused.
    """
    talk = OracleConversation(make_frontend(tiny_checkpoint))
    ways = (*TORCH, *CHUNKS, "numerics=invariant", *in_step(QWEN3_OMNI))
    with thread_fleet(redis_url, *ways, checkpoint=tiny_checkpoint, transfer="nixl") as fleet:
        async with gateway(fleet) as client:
            spec, blob = await second_turn(client, talk, TURNS[0], TURNS[2])
            expected = await answer(client, replace(spec, id=new_request_id(), session=""), blob)

            def kill(edge: EdgeName, index: int) -> None:
                if (edge, index) == (TEXT, 3):
                    for stage in (THINKER, TALKER):
                        dying = fleet.owner(spec.id, stage)
                        assert dying.tasks[spec.id].cached_rows
                        fleet.add_worker(stage)
                        fleet.kill(dying)

            assert_same(await answer_disturbed(client, spec, blob, kill), expected)


async def test_each_stage_caches_its_own_prefix_and_may_lose_it(
    redis_url: str, tiny_checkpoint: Path
) -> None:
    """Every stage caches its own prefix and may lose it: a Thinker that recomputes everything
    produces the rows that the Talker has cached.
    """
    frontend = make_frontend(tiny_checkpoint)
    talk = OracleConversation(frontend)
    with thread_fleet(redis_url, *TORCH, "numerics=invariant", checkpoint=tiny_checkpoint) as fleet:
        async with gateway(fleet) as client:
            spec, blob = await second_turn(client, talk, TURNS[0], TURNS[1])
            keeper = next(loop for loop in fleet.loops if loop.stage == THINKER)
            fleet.add_worker(THINKER)
            fleet.kill(keeper)
            got = await answer(client, spec, blob)
            assert (
                await reused_rows(client, spec, THINKER)
                == 0
                < await reused_rows(client, spec, TALKER)
            )
            assert_same(
                got, await answer(client, replace(spec, id=new_request_id(), session=""), blob)
            )


async def test_text_only_turn_caches_the_rows_a_spoken_turn_needs(
    redis_url: str, tiny_checkpoint: Path
) -> None:
    talk = OracleConversation(make_frontend(tiny_checkpoint))
    with thread_fleet(
        redis_url, *TORCH, *CHUNKS, "numerics=invariant", checkpoint=tiny_checkpoint
    ) as fleet:
        async with gateway(fleet) as client:
            spec, blob = talk.ask(TURNS[0])
            talk.add_answer(
                await answer(client, replace(spec, session=TALK, outputs=(TEXT,)), blob)
            )
            spec, blob = talk.ask(TURNS[1])
            with_session = replace(spec, session=TALK)
            got = await answer(client, with_session, blob)
            assert await reused_rows(client, with_session, THINKER) > first_audio(
                spec, talk.frontend
            )
            assert_same(got, await answer(client, replace(spec, id=new_request_id()), blob))


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
async def test_other_audio_with_equal_ids_is_not_reused(
    redis_url: str, tiny_checkpoint: Path, numerics: str
) -> None:
    talk = OracleConversation(make_frontend(tiny_checkpoint))
    with thread_fleet(
        redis_url, *TORCH, f"numerics={numerics}", checkpoint=tiny_checkpoint
    ) as fleet:
        async with gateway(fleet) as client:
            spec, blob = await second_turn(client, talk, TURNS[0], TURNS[1])
            talk.messages[0] = user("What do you hear?", wav_part(speech_like(LONGEST_S, 9)))
            talk.messages = talk.messages[:-2]
            other, other_blob = talk.ask(TURNS[1])
            assert other.prompt_ids == spec.prompt_ids and other_blob != blob
            other = replace(other, session=TALK)
            got = await answer(client, other, other_blob)
            assert await reused_rows(client, other, THINKER) == first_audio(other, talk.frontend)
            if numerics == "invariant":
                assert_same(
                    got,
                    await answer(
                        client, replace(other, id=new_request_id(), session=""), other_blob
                    ),
                )


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
async def test_longer_clip_invalidates_earlier_clips_in_invariant_numerics_only(
    redis_url: str, tiny_checkpoint: Path, numerics: str
) -> None:
    """A longer clip invalidates earlier clips in invariant numerics only. Clips are padded to the
    longest, and rows computed beside a shorter clip cannot be reused there.
    """
    talk = OracleConversation(make_frontend(tiny_checkpoint))
    with thread_fleet(
        redis_url, *TORCH, f"numerics={numerics}", checkpoint=tiny_checkpoint
    ) as fleet:
        async with gateway(fleet) as client:
            longer = user("And now?", wav_part(speech_like(LONGEST_S + 1, 3)))
            spec, blob = await second_turn(client, talk, TURNS[0], longer)
            got = await answer(client, spec, blob)
            reused = await reused_rows(client, spec, THINKER)
            if numerics == "fast":
                first, _ = OracleConversation(talk.frontend).ask(TURNS[0])
                assert reused == len(first.prompt_ids) + len(talk.answers[0]) - 1
            else:
                assert reused == first_audio(spec, talk.frontend)
                assert_same(
                    got, await answer(client, replace(spec, id=new_request_id(), session=""), blob)
                )
