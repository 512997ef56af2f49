"""The shipped checkpoint Pocket: a fleet's answers match `transformers`, and sampled answers end
and are audible.

`fleet pocket eval` judges their quality; these tests hold for any weights worth shipping.
"""

from pathlib import Path

import numpy as np
import pytest
import soxr

from fleet.cli.checkpoint import resolve_checkpoint
from fleet.config import load_config
from fleet.lab.pocket.judge.questions import speak_all
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, Voice
from fleet.processing.base import Message
from fleet.processing.qwen3_omni import OmniFrontend
from tests.harness import thread_fleet
from tests.oracle.cases import (
    RATE_HZ,
    TALKER,
    THINKER,
    Case,
    Samplings,
    expected,
    make_frontend,
    said,
    spec_of,
    user,
    wav_part,
)
from tests.oracle.fleet_answers import TORCH, SpokenAnswer, ask, assert_matches
from tests.oracle.oracle import Oracle
from web.gateway.sampling import stage_defaults

TOKENS, FRAMES = 64, 100
"""Length limits, twice the longest of these answers: an answer that reaches a limit does not end by
itself.
"""
SPOKEN = ("what day comes after monday", "what is my name")
SOUND = (0.01, 0.5)
"""Range of an answer's RMS, relative to full scale; the teacher's speech has about 0.1."""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return resolve_checkpoint(load_config(None, ()))


@pytest.fixture(scope="module")
def frontend(checkpoint: Path) -> OmniFrontend:
    return make_frontend(checkpoint)


@pytest.fixture(scope="module")
def own(frontend: OmniFrontend) -> Samplings:
    """Default sampling parameters of each stage."""
    return stage_defaults(load_config(None, ()), frontend.sampling())


@pytest.fixture(scope="module")
def cases() -> tuple[Case, ...]:
    """Cases with prompts typed or spoken by the teacher model, of one turn or two, in both
    voices.
    """
    after_monday, my_name = (
        _spoken_by(speech.samples) for speech in speak_all([(text, Voice()) for text in SPOKEN])
    )
    introduced = (user("My name is Anna."), said("assistant", "nice to meet you anna"))
    asked = {
        ("typed", "ethan"): (user("What is seven plus five?"),),
        ("spoken", "chelsie"): (after_monday,),
        ("two turns", "chelsie"): (*introduced, user("What is my name?")),
        ("two turns, then spoken", "ethan"): (*introduced, my_name),
    }
    return tuple(
        Case(name=name, messages=messages, voice=voice, tokens=TOKENS, frames=FRAMES)
        for (name, voice), messages in asked.items()
    )


def _spoken_by(samples: np.ndarray) -> Message:
    return Message(
        role="user", content=(wav_part(soxr.resample(samples, SAMPLE_RATE_HZ, RATE_HZ)),)
    )


def assert_whole(answers: dict[str, SpokenAnswer], frontend: OmniFrontend) -> None:
    """Check that text and speech end by themselves, and that the speech is neither silent nor
    clipped.
    """
    for name, answer in answers.items():
        assert answer.ids[-1] in frontend.end_ids(), f"{name}: {TOKENS} tokens are no answer"
        # The frame that would be the last one allowed is never spoken: its place is the end's.
        assert 0 < len(answer.codes) < FRAMES - 1, f"{name}: {len(answer.codes)} frames"
        level = float(np.sqrt(np.mean((answer.pcm / 32768.0) ** 2)))
        assert SOUND[0] < level < SOUND[1], f"{name}: RMS {level:.4f}"


async def test_greedy_answers_match_single_generate_calls(
    redis_url: str,
    checkpoint: Path,
    frontend: OmniFrontend,
    own: Samplings,
    cases: tuple[Case, ...],
) -> None:
    oracle = Oracle(checkpoint)
    truth = {
        case.name: expected(oracle, *spec_of(case, frontend, sampling=own), case) for case in cases
    }
    with thread_fleet(redis_url, *TORCH, checkpoint=checkpoint) as fleet:
        got = await ask(fleet, checkpoint, concurrently=True, cases=cases, sampling=own)
    assert_matches(got, truth)
    assert_whole(got, frontend)


@pytest.mark.one_in(2, "sampled Pocket")
@pytest.mark.parametrize("temperature", [None, 0.7], ids=["its own sampling", "temperature 0.7"])
async def test_sampled_answer_ends_is_audible_and_repeats_with_its_seed(
    redis_url: str,
    checkpoint: Path,
    frontend: OmniFrontend,
    own: Samplings,
    cases: tuple[Case, ...],
    temperature: float | None,
) -> None:
    """Sampled answers end, are audible and repeat with their seed: half of the cases, in
    `invariant` numerics, so that no sampled token depends on the batch.
    """
    with thread_fleet(redis_url, *TORCH, "numerics=invariant", checkpoint=checkpoint) as fleet:
        first, again, other = [
            await ask(
                fleet,
                checkpoint,
                concurrently=True,
                temperature=temperature,
                seed=seed,
                cases=cases[:2],
                sampling=own,
            )
            for seed in (5, 5, 6)
        ]
    assert_whole(first, frontend)
    assert_whole(other, frontend)
    assert _same(first, again), "the same seed, another answer"
    if temperature is not None:
        assert not _same(first, other), "another seed, the same answer"
    elif own[THINKER].temperature == own[TALKER].temperature == 0:
        assert _same(first, other), "nothing is drawn, and yet a seed changes the answer"


def _same(one: dict[str, SpokenAnswer], another: dict[str, SpokenAnswer]) -> bool:
    return all(
        np.array_equal(spoken.ids, another[name].ids)
        and np.array_equal(spoken.codes, another[name].codes)
        and np.array_equal(spoken.pcm, another[name].pcm)
        for name, spoken in one.items()
    )
