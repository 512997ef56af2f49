"""Thinker and Talker on the torch engine, driven without workers, compared with single `generate()`
calls of `transformers`.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fleet.core.errors import BadInput, EngineError
from fleet.core.ids import StageName
from fleet.graphs import ALL, EACH, ChunkPolicy
from fleet.lab.measure.twin import Answers
from tests.oracle.cases import CASES
from tests.oracle.twins import (
    Built,
    Truth,
    TwinRequests,
    ask,
    assert_all_pages_free,
    codes_of,
    speaking_stages,
    speaking_twin,
    tokens_of,
    with_invalid_audio,
)

pytestmark = pytest.mark.one_file_in(6, "engines")

THINKER, TALKER = StageName("thinker"), StageName("talker")


def assert_matches(answers: Answers, asked: TwinRequests, truth: Truth) -> None:
    for case, spec in zip(asked.cases, asked.specs, strict=True):
        want = truth[case.name]
        assert tokens_of(answers, spec.id) == want.token_ids, f"{case.name}: answer tokens"
        codes = codes_of(answers, spec.id)
        assert codes.shape[1] == want.codes.shape[1], f"{case.name}: number of frames"
        assert not codes.size or np.array_equal(codes, want.codes), f"{case.name}: codes"


def test_cases_have_their_declared_properties(truth: Truth) -> None:
    assert len(truth["one token"].token_ids) == 1
    assert truth["one token"].codes.shape[1] == 0
    assert truth["over 300 frames"].codes.shape[1] > 300
    assert len({tuple(answer.token_ids) for answer in truth.values()}) >= len(CASES) - 1


@pytest.mark.parametrize("prefill_chunk_tokens", [1, 7, 256])
def test_eight_concurrent_requests_match_in_every_prompt_chunk_size(
    tiny_checkpoint: Path, truth: Truth, prefill_chunk_tokens: int
) -> None:
    built = speaking_stages(tiny_checkpoint, prefill_chunk_tokens=prefill_chunk_tokens)
    asked = ask(tiny_checkpoint)
    assert_matches(speaking_twin(built).run(asked.specs, asked.blobs), asked, truth)
    assert_all_pages_free(built)


def test_single_requests_match(tiny_checkpoint: Path, built: Built, truth: Truth) -> None:
    for case in CASES:
        asked = ask(tiny_checkpoint, [case])
        assert_matches(speaking_twin(built).run(asked.specs, asked.blobs), asked, truth)
    assert_all_pages_free(built)


@pytest.mark.parametrize("policy", [EACH, ALL], ids=["each item at once", "everything at the end"])
def test_answers_match_for_every_chunk_policy(
    tiny_checkpoint: Path, built: Built, truth: Truth, policy: ChunkPolicy
) -> None:
    asked = ask(tiny_checkpoint)
    twin = speaking_twin(built, lambda _: policy)
    assert_matches(twin.run(asked.specs, asked.blobs), asked, truth)


def test_answers_match_with_more_requests_than_a_pass_holds(
    tiny_checkpoint: Path, truth: Truth
) -> None:
    built = speaking_stages(tiny_checkpoint, max_batch=3)
    asked = ask(tiny_checkpoint)
    assert_matches(speaking_twin(built).run(asked.specs, asked.blobs), asked, truth)


@pytest.mark.parametrize(
    "policy",
    [EACH, ChunkPolicy(kind="ramp", ramp=(1, 1, 1, 6))],
    ids=["text at once", "text in bursts"],
)
def test_small_pool_recomputes_evicted_requests(
    tiny_checkpoint: Path, truth: Truth, policy: ChunkPolicy
) -> None:
    """Evicted requests are recomputed: 12 pages of 16 positions hold any one of the requests, but
    not all. Bursts leave the Talker waiting for text.
    """
    cases = [case for case in CASES if case.frames <= 70]
    built = speaking_stages(tiny_checkpoint, kv_pages=12)
    asked = ask(tiny_checkpoint, cases)
    assert_matches(
        speaking_twin(built, lambda _: policy).run(asked.specs, asked.blobs), asked, truth
    )
    assert_all_pages_free(built)


def test_failed_request_does_not_fail_its_batch(
    tiny_checkpoint: Path, built: Built, truth: Truth
) -> None:
    asked = ask(tiny_checkpoint)
    poisoned, blobs = with_invalid_audio(asked)
    twin = speaking_twin(built)
    answers = twin.run(asked.specs, blobs)
    assert list(twin.errors) == [poisoned.id]
    assert isinstance(twin.errors[poisoned.id], EngineError)
    rest = [
        (case, spec)
        for case, spec in zip(asked.cases, asked.specs, strict=True)
        if spec is not poisoned
    ]
    others = TwinRequests(
        cases=tuple(case for case, _ in rest), specs=tuple(spec for _, spec in rest), blobs={}
    )
    assert_matches(answers, others, truth)
    assert_all_pages_free(built)


def test_audio_that_does_not_fit_the_prompt_is_bad_input(
    tiny_checkpoint: Path, built: Built
) -> None:
    asked = ask(tiny_checkpoint, [case for case in CASES if case.name == "audio"])
    spec = asked.specs[0]
    twin = speaking_twin(built)
    twin.run([spec], {spec.id: asked.blobs[spec.id][:64_000]})
    assert isinstance(twin.errors[spec.id], BadInput)
    assert_all_pages_free(built)


def test_unknown_voice_is_bad_input(built: Built, tiny_checkpoint: Path) -> None:
    spec = ask(tiny_checkpoint, CASES[:1]).specs[0]
    request, _ = built[TALKER].adapter(spec, None).open()
    stranger = replace(request, params={**request.params, "voice": "nobody"})
    with pytest.raises(BadInput, match="chelsie, ethan"):
        built[TALKER].engine.submit(stranger)


def test_abort_frees_memory_and_leaves_other_requests(
    tiny_checkpoint: Path, built: Built, truth: Truth
) -> None:
    asked = ask(tiny_checkpoint, CASES[:4])
    victim, kept = (
        asked.specs[0],
        TwinRequests(cases=asked.cases[1:], specs=asked.specs[1:], blobs=asked.blobs),
    )
    twin = speaking_twin(built)
    answers: Answers = {spec.id: {} for spec in asked.specs}
    for number, made in enumerate(twin.stream(asked.specs, asked.blobs)):
        if made.request == victim.id and number > 20:
            twin.abort(victim.id)
        if made.arrays:
            answers[made.request].setdefault(made.edge, []).append(made.arrays)
    assert_matches(answers, kept, truth)
    assert_all_pages_free(built)
