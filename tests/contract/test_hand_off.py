"""Contract of hand-offs of KV blocks on real engines and transfers: lent pages, copies, and
failures.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import pytest
import torch

from fleet.core.errors import ConfigError, OutOfMemory, TransferError
from fleet.core.ids import RequestId, StageName, Walk, WorkerId, role_of
from fleet.core.pages import Memory
from fleet.core.request import Sampling
from fleet.engine.base import NUM_POSITIONS, Engine, EngineInput, EngineRequest
from fleet.engine.capabilities import KVPages
from fleet.engine.torch import kv_transfer
from fleet.engine.torch.kv_pool import KVPool
from fleet.models.causal_lm.program import CausalTask
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.stages import text
from fleet.transfer.base import Transfer
from fleet.transfer.factory import open_transfer
from fleet.transfer.nixl import NixlTransfer
from fleet.worker.loop import hand_off_coordinator
from fleet.worker.task.hand_off import ImportState, KVImport, Offer, Offers, pool_on_gpu, share_pool
from tests.harness import thread_fleet
from tests.stage_options import stage_options
from tests.support import wait_until

MIB = 1024 * 1024
ARENA_BYTES = 8 * MIB
REQUEST = RequestId("handed")
NUM_ROWS, NUM_TOKENS = 40, 6
DEADLINE_S, LEASE_S = 10.0, 3600.0
NAMES = iter(range(1_000_000))
"""Numbers for worker ids, which are never reused."""


@dataclass(slots=True, kw_only=True)
class HandOffEnd:
    """A worker's end of a hand-off: its engine, transfer and offers."""

    worker: WorkerId
    engine: Engine
    transfer: Transfer
    offers: Offers

    def open(self, begun: Sequence[int] = ()) -> None:
        history = {"ids": np.array(begun, np.int32)} if begun else {}
        sampling, params = Sampling(max_tokens=NUM_TOKENS), {NUM_POSITIONS: "64"}
        self.engine.submit(
            EngineRequest(request_id=REQUEST, sampling=sampling, params=params, history=history)
        )
        ids = (np.arange(NUM_ROWS) % 40 + 5).astype(np.int32)
        self.engine.feed(
            REQUEST, EngineInput(walk=Walk("prefill"), arrays={"ids": ids}, final=True)
        )

    def run(self, most_steps: int = 100) -> list[int]:
        """Step the engine until it is idle; return all sampled tokens."""
        made: list[int] = []
        for _ in range(most_steps):
            made += self.step()
            if not self.engine.is_ready():
                return made
        raise AssertionError("the engine never runs out of work")

    def step(self) -> list[int]:
        arrays = [array for output in self.engine.step() for array in output.arrays.values()]
        return [int(token) for array in arrays for token in array.ravel()]

    def holds(self) -> tuple[int, int]:
        return self.engine.stats().kv.pages_used, self.transfer.used_slots()


Ends = tuple[HandOffEnd, HandOffEnd]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("lm"))


class EndFactory(Protocol):
    """Creates the workers (ends) of a hand-off."""

    def __call__(
        self, kind: str, kv_pages: int = 64, page_size_tokens: int = 16, dtype: str = "float32"
    ) -> HandOffEnd: ...


@pytest.fixture
def new_end(checkpoint: Path) -> Iterator[EndFactory]:
    opened: list[HandOffEnd] = []

    def open_end(
        kind: str, kv_pages: int = 64, page_size_tokens: int = 16, dtype: str = "float32"
    ) -> HandOffEnd:
        worker = WorkerId(f"lm@here:{next(NAMES)}")
        options = stage_options(
            stage=StageName("lm"),
            checkpoint=checkpoint,
            max_batch=4,
            kv_pages=kv_pages,
            page_size_tokens=page_size_tokens,
            dtype=dtype,
        )
        engine = text.build(options).engine
        transfer = open_transfer(
            "redis" if kind == "inline" else "nixl", worker, ARENA_BYTES, ARENA_BYTES
        )
        if kind == "pages":
            share_pool(engine, transfer)
        end = HandOffEnd(
            worker=worker,
            engine=engine,
            transfer=transfer,
            offers=Offers(engine, transfer, worker),
        )
        opened.append(end)
        return end

    yield open_end
    for end in opened:
        assert end.holds() == (0, 0), "a test left something behind"
        end.transfer.close()


@pytest.fixture(params=["pages", "copies", "inline"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ends(new_end: EndFactory, kind: str) -> Ends:
    return new_end(kind), new_end(kind)


def offered(source: HandOffEnd) -> tuple[Offer, list[int]]:
    """Let `source` compute the prompt and sample the first token; return its offer of the
    request.
    """
    source.open()
    begun: list[int] = []
    while not begun:
        begun = source.step()
    offer = source.offers.publish(REQUEST, source.offers.finish(REQUEST))
    assert offer is not None and not source.engine.is_ready()
    return offer, begun


def kv_import_of(offer: Offer, source: HandOffEnd, target: HandOffEnd) -> KVImport:
    return KVImport(
        offer,
        target.engine.kv,
        target.transfer,
        lambda _worker: source.transfer.metadata(),
        DEADLINE_S,
    )


def imported(kv_import: KVImport) -> bool:
    """Import confirmed KV blocks into the engine."""
    kv_import.enter(ImportState.CONFIRMING)
    return kv_import.import_into(REQUEST)


def pulled(offer: Offer, source: HandOffEnd, target: HandOffEnd) -> KVImport:
    """Import the offer and wait for its KV blocks."""
    kv_import = kv_import_of(offer, source, target)
    wait_until(
        lambda: kv_import.poll() or kv_import.state is not ImportState.PULLING,
        "the blocks to come",
    )
    assert kv_import.state is ImportState.ARRIVED
    return kv_import


def undisturbed(end: HandOffEnd) -> list[int]:
    end.open()
    return end.run()


def test_importing_engine_continues_where_the_source_ended(ends: Ends, kind: str) -> None:
    source, target = ends
    whole = undisturbed(source)
    offer, begun = offered(source)
    assert (offer.pages is not None, bool(offer.location), bool(offer.data)) == tuple(
        kind == this for this in ("pages", "copies", "inline")
    )
    target.open(begun)
    kv_import = pulled(offer, source, target)
    assert kv_import.pulled_us is not None
    assert imported(kv_import)
    assert kv_import.free_pages(), "what was adopted is the engine's"
    source.offers.free(REQUEST)
    assert source.holds() == (0, 0), "freed as soon as it is taken"
    assert target.run() == whole


def test_unconfirmed_import_is_refused_and_frees_its_pages(ends: Ends) -> None:
    source, target = ends
    offer, _ = offered(source)
    kv_import = pulled(offer, source, target)
    with pytest.raises(AssertionError, match="ARRIVED cannot become .*IMPORTED"):
        kv_import.enter(ImportState.IMPORTED)
    assert kv_import.free_pages()
    source.offers.free(REQUEST)


def test_cancelled_import_frees_its_pages_once_no_read_can_write_to_them(ends: Ends) -> None:
    source, target = ends
    offer, _ = offered(source)
    kv_import = kv_import_of(offer, source, target)
    kv_import.poll()
    kv_import.abandon()

    def taken_back() -> bool:
        # Counting slots takes in the reads that have landed, as a worker's slow poll does.
        return target.transfer.used_slots() == 0 and kv_import.free_pages()

    wait_until(taken_back, "the place to be free")
    source.offers.free(REQUEST)


def test_offer_stands_until_withdrawn_or_replaced(ends: Ends) -> None:
    source, _ = ends
    for _ in range(2):
        offered(source)
        assert source.offers.open_requests() == [REQUEST]
        assert source.offers.withdrawn() == []
    source.offers.withdraw(REQUEST)
    assert source.offers.withdrawn() == [REQUEST]
    assert sum(source.holds()) > 0, "it is freed only once no worker can import it"
    source.offers.free(REQUEST)
    source.offers.free(REQUEST)
    source.offers.withdraw(REQUEST)
    assert source.offers.withdrawn() == []
    assert source.offers.open_requests() == []


@pytest.mark.parametrize("kind", ["pages", "copies"], indirect=True)
def test_import_from_missing_source_fails(ends: Ends) -> None:
    source, target = ends
    offer, _ = offered(source)

    def gone(_worker: WorkerId) -> bytes:
        raise TransferError("it is gone")

    kv_import = KVImport(offer, target.engine.kv, target.transfer, gone, DEADLINE_S)
    kv_import.poll()
    assert kv_import.state is ImportState.FAILED and kv_import.blocks is None
    assert kv_import.free_pages()
    source.offers.free(REQUEST)


@pytest.mark.parametrize(("kv_pages", "page_size_tokens"), [(64, 8), (1, 16)])
def test_import_into_different_or_too_small_pool_fails(
    new_end: EndFactory, kv_pages: int, page_size_tokens: int
) -> None:
    source, target = new_end("pages"), new_end("pages", kv_pages, page_size_tokens)
    offer, _ = offered(source)
    kv_import = kv_import_of(offer, source, target)
    kv_import.poll()
    assert kv_import.state is ImportState.FAILED and kv_import.free_pages()
    source.offers.free(REQUEST)


@pytest.mark.parametrize(
    ("dtype", "page_size_tokens"), [("bfloat16", 16), ("float16", 32), ("float32", 8)]
)
def test_blocks_of_another_dtype_or_page_size_are_recomputed(
    new_end: EndFactory,
    kind: str,
    dtype: str,
    page_size_tokens: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = new_end(kind), new_end(kind, page_size_tokens=page_size_tokens, dtype=dtype)
    offer, begun = offered(source)
    target.open(begun)
    whole = target.run()
    target.open(begun)
    kv_import = kv_import_of(offer, source, target)
    wait_until(
        lambda: kv_import.poll() or kv_import.state is not ImportState.PULLING,
        "the blocks to come, or not",
    )
    assert (kv_import.state is ImportState.FAILED) == (kind == "pages"), "pages are not even read"
    assert kv_import.state is ImportState.FAILED or not imported(kv_import)
    assert len([record for record in caplog.records if "computed here" in record.getMessage()]) == (
        kind != "pages"
    )
    assert kv_import.free_pages() and target.run() == whole
    source.offers.free(REQUEST)


def test_pages_are_copied_when_pool_is_short_of_pages(
    new_end: EndFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "LENDING_SHARE", 1.0)
    source, target = new_end("pages"), new_end("pages")
    whole = undisturbed(source)
    offer, begun = offered(source)
    assert offer.pages is None and offer.location
    assert source.holds() == (0, 1)
    target.open(begun)
    kv_import = pulled(offer, source, target)
    assert not isinstance(kv_import.blocks, KVPages) and imported(kv_import)
    assert target.run() == whole
    source.offers.free(REQUEST)


def test_pages_on_offer_leave_room_for_others_until_the_pool_is_short(
    new_end: EndFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = new_end("pages")
    offered(source)
    assert source.offers.has_room()
    monkeypatch.setattr(kv_transfer, "LENDING_SHARE", 1.0)
    assert not source.offers.has_room(), "what is on offer has to be used first"
    source.offers.free(REQUEST)
    assert source.offers.has_room()


def memory_as_of_a_gpu(pool: KVPool) -> Memory:
    """Return the pool's memory, labelled with a GPU's number, which NIXL on a machine without that
    GPU refuses to register.
    """
    return Memory(pool.data.data_ptr(), pool.data.nbytes, 0)


def test_pages_on_a_gpu_are_copied_where_nixl_cannot_read_them(
    new_end: EndFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(KVPool, "memory", property(memory_as_of_a_gpu))
    with caplog.at_level(logging.INFO, "fleet.worker.task.hand_off"):
        source, target = new_end("pages"), new_end("pages")
    refused = (
        "keys and values on cuda:0 are handed off through host memory: NIXL could not "
        "register memory"
    )
    # A vLLM that an earlier test has started in this process also writes to the log.
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name == "fleet.worker.task.hand_off"
    ]
    assert len(messages) == 2 and all(message.startswith(refused) for message in messages)
    whole = undisturbed(source)
    offer, begun = offered(source)
    assert offer.pages is None and offer.location
    target.open(begun)
    assert imported(pulled(offer, source, target))
    source.offers.free(REQUEST)
    assert target.run() == whole


@pytest.mark.parametrize("kind", ["copies", "inline"], indirect=True)
def test_gpu_memory_that_cannot_be_read_is_refused_if_it_is_required(
    kind: str, new_end: EndFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = new_end(kind)
    monkeypatch.setattr(KVPool, "memory", property(memory_as_of_a_gpu))
    with pytest.raises(
        ConfigError,
        match=r"transfer.buffer_device: peers cannot read the memory of cuda:0 \(.+\); set auto or",
    ):
        share_pool(end.engine, end.transfer, "cuda")
    assert not pool_on_gpu(end.engine, "cpu")
    share_pool(end.engine, end.transfer, "cpu")
    assert not end.transfer.shares_memory


def raising(_place: object, *_args: object) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("kind", ["copies", "inline"], indirect=True)
def test_copy_without_memory_is_not_offered(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = ends
    source.open()
    while not source.step():
        pass
    monkeypatch.setattr(KVPool, "read", raising)
    assert source.offers.publish(REQUEST, source.offers.finish(REQUEST)) is None
    assert not source.engine.is_ready() and source.offers.open_requests() == []


@pytest.mark.parametrize("kind", ["copies", "inline"], indirect=True)
def test_rows_are_recomputed_when_import_finds_no_memory(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = ends
    whole = undisturbed(target)
    offer, begun = offered(source)
    target.open(begun)
    kv_import = pulled(offer, source, target)
    monkeypatch.setattr(KVPool, "write", raising)
    assert not imported(kv_import) and kv_import.free_pages()
    assert target.holds()[0] == 0, "pages that were written in part are no request's"
    assert target.run() == whole
    source.offers.free(REQUEST)


def test_request_fails_when_memory_runs_out_after_import(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request fails when memory runs out after its import. Its pages then belong to the request,
    and are freed with it, once.
    """
    source, target = ends
    offer, begun = offered(source)
    target.open(begun)
    kv_import = pulled(offer, source, target)
    with monkeypatch.context() as scarce:
        scarce.setattr(CausalTask, "on_computed", raising)
        assert imported(kv_import) and kv_import.free_pages()
    (output,) = target.engine.step()
    assert isinstance(output.error, OutOfMemory)
    source.offers.free(REQUEST)


def test_decode_worker_connects_to_each_source_once_in_advance(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker connects to each source once, in advance, also to a worker that joins later;
    otherwise the first read would delay an answer.
    """
    met: list[tuple[str, WorkerId]] = []
    meet = NixlTransfer.connect

    def noted(self: NixlTransfer, peer: WorkerId, peer_metadata: bytes) -> None:
        meet(self, peer, peer_metadata)
        met.append((role_of(self.agent), peer))

    monkeypatch.setattr(NixlTransfer, "connect", noted)
    monkeypatch.setattr(hand_off_coordinator, "CONNECT_S", 0.01)
    halves = ("stages.thinker.split.prefill.replicas=1", "stages.thinker.split.decode.replicas=1")
    with thread_fleet(redis_url, *halves, transfer="nixl") as fleet:
        first = next(loop.worker for loop in fleet.loops if loop.role == "thinker.prefill")
        wait_until(lambda: met == [("thinker.decode", first)], "the two halves to have met")
        later = fleet.add_worker("thinker.prefill").worker
        wait_until(lambda: len(met) > 1, "the later one to be met")
        assert met == [("thinker.decode", first), ("thinker.decode", later)]
