"""Contract of optional engine capabilities: hand-offs of KV caches, and cached prefixes.

A test that runs for all engines skips the calls that an engine lacks: its outputs must be the same.
"""

import ctypes
from pathlib import Path

import pytest

from fleet.core.ids import RequestId, StageName
from fleet.core.pages import spans_between
from fleet.core.request import Sampling
from fleet.engine.base import (
    NUM_POSITIONS,
    Engine,
    EngineInput,
    EngineRequest,
)
from fleet.engine.capabilities import KVBlocks
from fleet.stages import text
from tests.capabilities import kv_of, pages_of
from tests.contract.engine_subjects import (
    NUM_TOKENS,
    WALK,
    Subject,
    ids,
    joined,
    new_subject,
    output_of,
    run_out,
    submit,
)
from tests.stage_options import stage_options


@pytest.fixture
def lender(folders: dict[str, Path]) -> Subject:
    """An engine whose KV pages other processes can read."""
    return new_subject("autoregressive", folders)


def num_cached(engine: Engine, session: str) -> int:
    return engine.prefixes.num_rows(session) if engine.prefixes is not None else 0


def drop_cached(engine: Engine, session: str | None = None) -> None:
    if engine.prefixes is not None:
        engine.prefixes.drop(session)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_exported_rows_can_be_imported_and_continued(subject: Subject, num_steps: int) -> None:
    submit(subject, "a", length=20)
    whole = output_of(run_out(subject.engine))
    first = submit(subject, "first", length=20)
    begun = output_of([output for _ in range(num_steps) for output in subject.engine.step()])
    kv = subject.engine.kv
    blocks = kv.export_blocks(first) if kv is not None else None
    subject.engine.finish(first)
    second = submit(subject, "second", length=20, history=begun)
    if kv is not None and blocks is not None:
        assert blocks.num_rows == 20 + num_steps - 1
        cut = KVBlocks(num_rows=blocks.num_rows, data=blocks.data[:-1])
        assert not kv.import_blocks(second, cut), "not whole pages"
        assert kv.import_blocks(second, blocks)
        assert not kv.import_blocks(second, blocks), "it has begun"
    again = output_of(run_out(subject.engine))
    assert {name: array.tolist() for name, array in again.items()} == {
        name: array.tolist() for name, array in whole.items()
    }
    assert subject.engine.stats().kv.pages_used == 0


@pytest.mark.parametrize("num_steps", [1, 3])
def test_lent_pages_can_be_read_and_imported(lender: Subject, num_steps: int) -> None:
    """Lent pages can be read and imported; the test copies the bytes as another process would."""
    subject, engine, pages = lender, lender.engine, pages_of(lender.engine)
    submit(subject, "a", length=20)
    whole = output_of(run_out(engine))
    first = submit(subject, "first", length=20)
    begun = output_of([output for _ in range(num_steps) for output in engine.step()])
    lent = pages.lend(first)
    assert lent is not None and lent.num_rows == 20 + num_steps - 1
    assert engine.stats().running == 0 and not engine.is_ready(), "lending ends the request"
    second = submit(subject, "second", length=20, history=begun)
    received = pages.reserve(lent.num_rows)
    assert received is not None
    for span in spans_between(lent.at, received.at):
        ctypes.memmove(span.local_address, span.remote_address, span.length_bytes)
    assert pages.import_pages(second, received)
    assert not pages.import_pages(second, lent), "it has begun"
    pages.free(lent)
    again = output_of(run_out(engine))
    assert {name: array.tolist() for name, array in again.items()} == {
        name: array.tolist() for name, array in whole.items()
    }
    assert engine.stats().kv.pages_used == 0


def test_reserved_pages_without_import_can_be_freed(lender: Subject) -> None:
    pages = pages_of(lender.engine)
    received = pages.reserve(20)
    assert received is not None
    assert lender.engine.stats().kv.pages_used == len(received.at.pages) > 0
    assert not pages.import_pages(RequestId("unknown"), received)
    pages.free(received)
    assert lender.engine.stats().kv.pages_used == 0
    assert pages.lend(RequestId("unknown")) is None


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
    assert pages_of(short.engine).lend(request) is None
    assert pages_of(short.engine).reserve(20) is None
    assert kv_of(short.engine).export_blocks(request) is not None, "a copy can be had"
    assert run_out(short.engine)[-1].final
    assert short.engine.stats().kv.pages_used == 0


def test_session_reuses_rows_without_changing_output(subject: Subject) -> None:
    """A session reuses rows without changing the output: every turn is repeated without a session,
    and the outputs are compared.
    """
    engine, kept, lengths = subject.engine, 0, (8, 12, 12, 5)
    for turn, length in enumerate(lengths):
        before = engine.stats().kv.rows_reused
        request = submit(subject, f"turn-{turn}", length=length, session="talk")
        reused = engine.stats().kv.rows_reused - before
        assert reused == (
            min(kept, length - 1, *lengths[max(turn - 1, 0) : turn + 1]) if turn else 0
        )
        assert num_cached(engine, "talk") == 0, "its pages belong to the request now"
        mine = joined(run_out(engine), request)
        kept = num_cached(engine, "talk")
        assert kept == (length + (NUM_TOKENS - 1) * subject.caches_answer if subject.caches else 0)
        request = submit(subject, f"alone-{turn}", length=length)
        assert joined(run_out(engine), request) == mine
        stats = engine.stats()
        assert stats.kv.pages_used == stats.kv.pages_cached and num_cached(engine, "talk") == kept
    drop_cached(engine, "other")
    assert num_cached(engine, "talk") == kept
    drop_cached(engine, "talk")
    assert (num_cached(engine, "talk"), engine.stats().kv.pages_used) == (0, 0)


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
    drop_cached(subject.engine)
    assert subject.engine.stats().kv.pages_used == 0


def test_aborted_turn_leaves_nothing_cached(subject: Subject) -> None:
    submit(subject, "first", session="talk")
    run_out(subject.engine)
    second = submit(subject, "second", length=20, session="talk")
    subject.engine.step()
    subject.engine.abort(second)
    assert (num_cached(subject.engine, "talk"), subject.engine.stats().kv.pages_used) == (
        0,
        0,
    )
