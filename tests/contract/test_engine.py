"""Contract of engines: the fake engine, the autoregressive loop, the codec loop, the recogniser's
loop and the loop of a voice must behave alike.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fleet.core.chunk import LOGPROBS, TOP_IDS
from fleet.core.errors import BadInput, EngineStopped, UnsupportedValue
from fleet.core.ids import RequestId, StageName
from fleet.core.request import Sampling
from fleet.engine.base import (
    NUM_POSITIONS,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
)
from fleet.engine.fake import FakeEngine
from fleet.engine.vllm.engine import VllmEngine
from fleet.stages import text
from tests.contract.engine_subjects import (
    NUM_TOKENS,
    VLLM,
    WALK,
    Subject,
    ids,
    joined,
    new_subject,
    output_of,
    run_out,
    submit,
)
from tests.contract.llm_double import LlmDouble, started
from tests.stage_options import stage_options


def test_request_runs_to_final_output_and_is_removed(subject: Subject) -> None:
    request = submit(subject, "a")
    assert subject.engine.stats().running == 1
    outputs = run_out(subject.engine)
    assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {request}
    assert all(output.error is None for output in outputs)
    stats = subject.engine.stats()
    assert (stats.running, stats.ready, stats.kv.pages_used) == (0, 0, 0)


def test_batched_requests_give_as_much_output_as_alone(subject: Subject) -> None:
    alone: list[list[int]] = []
    for number in range(4):
        request = submit(subject, f"alone-{number}", length=4 + number)
        alone.append([len(part) for part in joined(run_out(subject.engine), request)])
    together = [submit(subject, f"together-{number}", length=4 + number) for number in range(4)]
    outputs = run_out(subject.engine)
    assert [[len(part) for part in joined(outputs, request)] for request in together] == alone
    assert subject.engine.stats().running == 0


def test_engine_is_not_ready_without_input(subject: Subject) -> None:
    subject.submitted.append(RequestId("a"))
    subject.engine.submit(
        EngineRequest(
            request_id=RequestId("a"), sampling=Sampling(max_tokens=3), params={NUM_POSITIONS: "9"}
        )
    )
    assert not subject.engine.is_ready()
    assert list(subject.engine.step()) == []


def test_due_time_is_zero_when_ready_and_infinite_when_waiting_for_input(subject: Subject) -> None:
    assert subject.engine.due_in_s() == math.inf
    request = submit(subject, "a")
    assert subject.engine.is_ready()
    assert subject.engine.due_in_s() == 0
    subject.engine.pause(request, paused=True)
    assert subject.engine.due_in_s() == math.inf
    subject.engine.pause(request, paused=False)
    run_out(subject.engine)
    assert subject.engine.due_in_s() == math.inf


def test_paced_request_keeps_its_own_interval() -> None:
    subject = Subject(engine=FakeEngine(max_batch=4, source=True, step_s=3600.0), piece=ids)
    submit(subject, "a")
    assert subject.engine.due_in_s() == 0
    assert len(subject.engine.step()) == 1
    assert not subject.engine.is_ready()
    assert 0 < subject.engine.due_in_s() <= 3600
    other = submit(subject, "b")
    assert subject.engine.is_ready()
    assert [output.request_id for output in subject.engine.step()] == [other]


def test_paused_request_is_skipped_and_others_continue(subject: Subject) -> None:
    waits, runs = submit(subject, "waits"), submit(subject, "runs")
    subject.engine.pause(waits, paused=True)
    assert {output.request_id for output in run_out(subject.engine)} == {runs}
    assert (subject.engine.stats().running, subject.engine.stats().ready) == (1, 0)
    subject.engine.pause(waits, paused=False)
    assert run_out(subject.engine)[-1].final


@pytest.mark.parametrize("name", VLLM)
def test_vllm_computes_a_paused_request_on_and_holds_its_outputs(
    shared_engine: Callable[[str], Engine], name: str
) -> None:
    vllm_engine = shared_engine(name)
    subject = Subject(engine=vllm_engine, piece=ids)
    whole = submit(subject, "whole")
    alone = joined(run_out(vllm_engine), whole)
    waits, runs = submit(subject, "waits"), submit(subject, "runs")
    begun = list(vllm_engine.step())
    vllm_engine.pause(waits, paused=True)
    during = run_out(vllm_engine)
    assert joined(begun + during, runs) == alone and all(
        output.request_id == runs for output in during
    )
    vllm_engine.pause(waits, paused=False)
    outputs = list(vllm_engine.step())
    assert outputs[-1].final and joined(begun + outputs, waits) == alone
    assert vllm_engine.stats().running == 0


@pytest.mark.parametrize("name", VLLM)
def test_vllm_reports_reused_rows_with_the_first_output_in_whole_blocks(
    shared_engine: Callable[[str], Engine], name: str
) -> None:
    block = 32
    subject = Subject(
        engine=shared_engine(name), piece=lambda length: {"ids": np.full(length, 77, np.int32)}
    )
    for turn, num_reused in (("first", 0), ("second", block)):
        submit(subject, turn, length=block + 20)
        assert [output.num_reused for output in run_out(subject.engine)] == [num_reused] + [0] * (
            NUM_TOKENS - 1
        )


def test_answer_that_vllm_ends_early_is_an_error_and_others_continue() -> None:
    llm = LlmDouble()
    subject = Subject(engine=VllmEngine(started(llm), frozenset()), piece=ids)
    lost, whole = submit(subject, "lost"), submit(subject, "whole")
    subject.engine.step()
    llm.lost.add(lost)
    outputs = run_out(subject.engine)
    assert [str(o.error) for o in outputs if o.request_id == lost] == [
        "vLLM ended the answer early: error"
    ]
    assert (
        outputs[-1].request_id == whole
        and outputs[-1].final
        and subject.engine.stats().running == 0
    )


def test_vllm_that_fails_for_good_stops_the_engine() -> None:
    llm = LlmDouble()
    engine = VllmEngine(started(llm), frozenset())
    engine.check()
    llm.failed = True
    with pytest.raises(
        EngineStopped, match="vLLM does not compute any more: EngineCore encountered an issue"
    ):
        engine.check()


@pytest.fixture(params=["fake", "autoregressive"])
def ending(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path) -> Subject:
    """An engine whose end token, if it has one, is the first token that it would sample."""
    if request.param == "fake":
        return Subject(engine=FakeEngine(max_batch=4, source=True), piece=ids)
    whole = output_of(run_lm(folders["text"]))["token"].tolist()
    folder = shutil.copytree(folders["text"], tmp_path / "ending")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": whole[0]}))
    assert output_of(run_lm(folder))["token"].tolist() == whole[:1]
    return Subject(engine=lm_of(folder), piece=ids)


def lm_of(folder: Path) -> Engine:
    return text.build(stage_options(stage=StageName("lm"), checkpoint=folder, max_batch=4)).engine


def run_lm(folder: Path) -> list[EngineOutput]:
    subject = Subject(engine=lm_of(folder), piece=ids)
    submit(subject, "a")
    return run_out(subject.engine)


@pytest.mark.parametrize(
    "wanted",
    [Sampling(min_tokens=4), Sampling(ignore_eos=True), Sampling(min_tokens=4, temperature=0.9)],
)
def test_answer_respects_min_tokens_and_ignore_eos(ending: Subject, wanted: Sampling) -> None:
    sampling = replace(wanted, max_tokens=NUM_TOKENS)
    submit(ending, "a", sampling=sampling)
    whole = output_of(run_out(ending.engine))
    (tokens,) = whole.values()
    assert len(tokens) == NUM_TOKENS if wanted.ignore_eos else 4 <= len(tokens) <= NUM_TOKENS
    submit(
        ending, "a", sampling=sampling, history={name: array[:2] for name, array in whole.items()}
    )
    again = output_of(run_out(ending.engine))
    assert {name: array.tolist() for name, array in again.items()} == {
        name: array.tolist() for name, array in whole.items()
    }


def test_abort_at_any_step_frees_everything_and_is_idempotent(subject: Subject) -> None:
    for steps in range(4):
        request = submit(subject, f"a-{steps}", length=20)
        for _ in range(steps):
            subject.engine.step()
        subject.engine.abort(request)
        subject.engine.abort(request)
        stats = subject.engine.stats()
        assert (stats.running, stats.kv.pages_used) == (0, 0)
        assert not subject.engine.is_ready()


def test_finish_ends_request_without_further_output(subject: Subject) -> None:
    request = submit(subject, "a", length=20)
    subject.engine.step()
    subject.engine.finish(request)
    assert run_out(subject.engine) == []
    assert (subject.engine.stats().running, subject.engine.stats().kv.pages_used) == (0, 0)


@pytest.mark.parametrize("num_known", [1, 3, NUM_TOKENS])
def test_history_is_returned_again_and_continued(subject: Subject, num_known: int) -> None:
    submit(subject, "a")
    whole = output_of(run_out(subject.engine))
    submit(subject, "a", history={name: array[:num_known] for name, array in whole.items()})
    outputs = run_out(subject.engine)
    again = output_of(outputs)
    assert {name: array.tolist() for name, array in again.items()} == {
        name: array.tolist() for name, array in whole.items()
    }
    assert outputs[-1].final and subject.engine.stats().kv.pages_used == 0


def test_calls_for_unknown_requests_are_ignored(subject: Subject) -> None:
    unknown = RequestId("unknown")
    subject.engine.feed(unknown, EngineInput(walk=WALK, arrays=subject.piece(2), final=True))
    subject.engine.pause(unknown, paused=True)
    subject.engine.finish(unknown)
    subject.engine.abort(unknown)
    assert not subject.engine.is_ready()


NAMED = Sampling(max_tokens=1, top_logprobs=0, logprob_ids=(7, 3))
"""A request for the log probabilities of two ids, of which a decision is made."""


def test_log_probabilities_of_named_ids_are_given(folders: dict[str, Path]) -> None:
    subject = new_subject("autoregressive", folders)
    submit(subject, "a", sampling=NAMED)
    output = output_of(run_out(subject.engine))
    assert output[TOP_IDS].tolist() == [[7, 3]] and output[LOGPROBS].shape == (1, 3)


@pytest.mark.parametrize("name", VLLM)
def test_vllm_refuses_log_probabilities_of_named_ids(
    name: str, shared_engine: Callable[[str], Engine]
) -> None:
    subject = Subject(engine=shared_engine(name), piece=ids)
    with pytest.raises(UnsupportedValue, match="logprob_ids: vLLM gives no"):
        submit(subject, "a", sampling=NAMED)
    assert subject.engine.stats().running == 0


def test_second_submit_of_a_request_is_refused(subject: Subject) -> None:
    submit(subject, "a")
    with pytest.raises(BadInput):
        submit(subject, "a")
    assert run_out(subject.engine)[-1].final


def test_request_id_can_be_reused_after_its_end(subject: Subject) -> None:
    request = submit(subject, "a")
    first = joined(run_out(subject.engine), request)
    submit(subject, "a")
    assert joined(run_out(subject.engine), request) == first
