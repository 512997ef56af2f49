"""A divided language model over three network namespaces whose links have a delay of 10 ms one way;
links that are cut.

Each answer is byte-equal to the answer of the whole model in one process. Hidden states use no
shared memory: their bytes are counted on the links.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.config import load_config
from fleet.control.dead_letters import read_letters
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.worker.main import build_stage
from tests.e2e.fleets import PATIENCE_S, worker_ids
from tests.e2e.linked_fleet import ANCHOR, LinkedFleet, linked_fleet, whole_settings
from tests.e2e.span_fleets import NUM_STREAMS, NUM_TOKENS, answer_seeds, seeded_spec
from tests.harness import EdgeArrays, assert_same, open_processes
from tests.support import RedisProcess, wait_until

pytestmark = [pytest.mark.network_namespaces, pytest.mark.thorough]
FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[0, 1], ids=["connections", "ucx"])
def linked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[LinkedFleet]:
    """A fleet whose hidden states travel on the span connections and, in a second run, a fleet in
    which NIXL reads passes of 1 KiB and more over TCP.
    """
    with linked_fleet(tmp_path_factory.mktemp("linked"), checkpoint, request.param) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def whole_answers(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> list[EdgeArrays]:
    """Answers of the whole model in one process."""
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        config = load_config(None, (*whole_settings(checkpoint), "transfer.kind=redis"))

        async def answer_all() -> list[EdgeArrays]:
            async with open_processes(
                server.url, config, lambda config, stage: build_stage(config, stage, checkpoint)
            ):
                return await answer_seeds(server.url, config, lambda: None, [])

        return asyncio.run(answer_all())
    finally:
        server.stop()


def assert_whole(answers: list[EdgeArrays], whole: list[EdgeArrays], fleet: LinkedFleet) -> None:
    """Fail unless `answers` equal `whole`, the answers of one process, and no request is lost."""
    assert len(answers) == len(whole) == NUM_STREAMS
    for received, expected in zip(answers, whole, strict=True):
        assert_same(received, expected)
    assert not read_letters(fleet.control)


async def check_rows(
    linked: LinkedFleet, whole_answers: list[EdgeArrays], checkpoint: Path
) -> None:
    """Compare answers with the whole model's, and check that the hidden states have crossed the
    links.
    """
    first, second = (linked.namespace_of(worker) for worker in linked.route().values())
    links = ((ANCHOR, first), (first, second), (second, ANCHOR))
    before = [linked.num_row_bytes(*link) for link in links]
    assert_whole(
        await answer_seeds(linked.url, linked.config, lambda: None, linked.requests),
        whole_answers,
        linked,
    )
    after = [linked.num_row_bytes(*link) for link in links]
    sizes = json.loads((checkpoint / "config.json").read_text())
    num_prompt_rows = sum(
        len(seeded_spec(linked.config, seed).prompt_ids) for seed in range(NUM_STREAMS)
    )
    row_bytes, logits_bytes = FLOAT_BYTES * sizes["hidden_size"], FLOAT_BYTES * sizes["vocab_size"]
    num_rows = num_prompt_rows + NUM_STREAMS * (NUM_TOKENS - 1)
    least = [row_bytes * num_rows, row_bytes * num_rows, logits_bytes * NUM_STREAMS * NUM_TOKENS]
    for number, needed in enumerate(least):
        on_connections, by_ucx = (
            now - earlier for now, earlier in zip(after[number], before[number], strict=True)
        )
        assert on_connections + by_ucx >= needed
        if not linked.nixl_kib:
            assert not by_ucx
        elif number < 2:
            assert by_ucx >= row_bytes * num_prompt_rows, "a prompt has more than 1 KiB"


async def test_rows_cross_the_links_and_one_that_is_cut_beyond_the_lease_loses_no_answer(
    linked: LinkedFleet, whole_answers: list[EdgeArrays], checkpoint: Path
) -> None:
    """Hidden states cross the links, and a link that is cut for longer than the lease loses no
    answer: passes of the worker that was cut off arrive after a standby worker has replaced it, and
    are refused.
    """
    await check_rows(linked, whole_answers, checkpoint)
    before, generation = linked.route(), linked.generation
    cut, last = before["1:1"], before["2:output"]
    place, others = linked.namespace_of(cut), [ANCHOR, linked.namespace_of(last)]
    log, log_of_last = linked.process_of(cut), linked.process_of(last)
    assert "it was fenced" not in log.output() and "arrive late" not in log_of_last.output()

    def cut_and_heal() -> None:
        linked.links.cut(place, others[1])
        wait_until(
            lambda: linked.num_lost_bytes(place, others[1]),
            "a pass to be lost on the link",
            PATIENCE_S,
        )
        linked.links.cut(place, ANCHOR)
        wait_until(lambda: cut not in worker_ids(linked.control), "its lease to lapse", PATIENCE_S)
        wait_until(lambda: cut not in linked.route().values(), "a route without it", PATIENCE_S)
        assert linked.generation > generation and linked.route()["2:output"] == last
        log_of_last.wait_for(f"route {linked.generation}: this worker has layers 2:output")
        for other in others:
            linked.links.heal(place, other)

    assert_whole(
        await answer_seeds(linked.url, linked.config, cut_and_heal, linked.requests),
        whole_answers,
        linked,
    )
    refused = f"messages of route {generation} from {cut} arrive late, and are refused"
    # the pass is on the connection, its rows are not: the agent that would send them may be closed
    if linked.nixl_kib:
        refused += (
            f"|the connection from {cut}, of a route that has ended, is closed .NIXL "
            "could not start a read"
        )
    log_of_last.wait_for(refused)
    log.wait_for("it was fenced")
