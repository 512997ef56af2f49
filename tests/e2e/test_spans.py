"""Span workers, anchors, the conductor and Redis are lost in mid-answer, by signals to real
processes.

Each answer is byte-equal to the answer of an undisturbed run.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest
import redis

from fleet.control import keys
from fleet.control.connect import text
from fleet.control.keys import PREFIX, row_of
from fleet.core.ids import RoleName, WorkerId, place_of
from fleet.worker.loop.loop import IDLE_BLOCK_MS
from tests.e2e.fleets import PATIENCE_S, process_of, worker_ids
from tests.e2e.saving import DisturbedSaves
from tests.e2e.span_fleets import (
    NUM_STREAMS,
    SPAN_ROLE,
    STAGE,
    SpanFleet,
    compare_disturbed_streams,
    span_fleet,
)
from tests.support import redis_answers, run_cli, wait_until

pytestmark = pytest.mark.one_file_in(4, "spans of processes")

FORWARD = ("0:0", ("1:1", "2:2", "3:output"))
REVERSE = ("2:output", ("0:0", "1:1"))
SHORT_LEASE = "lease.worker_ttl_s=1"


@pytest.fixture(scope="module")
def forward_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanFleet]:
    """A fleet with an anchor that has the first layers, and three span workers after it."""
    with span_fleet(tmp_path_factory.mktemp("forward"), *FORWARD, num_layers=4) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def reverse_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanFleet]:
    """A fleet with an anchor that has the last layers, two span workers before it, and one that
    stands by. NIXL reads the hidden states of prompts and of several answers.
    """
    own = (
        "stages.lm.spans.standby=1",
        SHORT_LEASE,
        "lease.end_hung_processes=false",  # frozen workers return
        "transfer.kind=nixl",
        "stages.lm.spans.nixl_kib=1",
    )
    with span_fleet(tmp_path_factory.mktemp("reverse"), *REVERSE, *own) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def two_anchors_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanFleet]:
    """A fleet with two anchors, each with one span worker."""
    with span_fleet(
        tmp_path_factory.mktemp("two"), "0:0", ("1:output",), "stages.lm.replicas=2"
    ) as fleet:
        yield fleet


@pytest.fixture
def two_anchors(two_anchors_up: SpanFleet) -> Iterator[SpanFleet]:
    yield from checked(two_anchors_up, 2, num_anchors=2)


@pytest.fixture
def forward(forward_up: SpanFleet) -> Iterator[SpanFleet]:
    yield from checked(forward_up, 3)


@pytest.fixture
def reverse(reverse_up: SpanFleet) -> Iterator[SpanFleet]:
    yield from checked(reverse_up, 3)


def checked(fleet: SpanFleet, num_span_workers: int, num_anchors: int = 1) -> Iterator[SpanFleet]:
    """Yield a complete fleet; afterwards check that no request is live, and that every Redis key
    has a row in the key table.
    """
    fleet.wait_complete(num_anchors, num_span_workers)
    yield fleet
    ours = [text(key) for key in fleet.control.scan_iter(match=f"{PREFIX}*")]
    assert not [key for key in ours if row_of(key) is None]
    assert not fleet.control.scard(keys.LIVE)
    assert not any(
        fleet.control.scard(keys.worker_tasks(worker)) for worker in worker_ids(fleet.control)
    )


def wait_unlisted(control: redis.Redis, *workers: WorkerId) -> None:
    wait_until(
        lambda: not set(workers) & worker_ids(control),
        f"{', '.join(workers)} to be unlisted",
        PATIENCE_S,
    )


def kill_workers(fleet: SpanFleet, *spans: str) -> Callable[[], None]:
    """Return a function that kills (SIGKILL) the span workers that have these spans."""

    def kill() -> None:
        route = fleet.route()
        lost = [route[span] for span in spans]
        for worker in lost:
            process_of(worker).kill()
        wait_unlisted(fleet.control, *lost)

    return kill


def moved_spans(before: dict[str, WorkerId], after: dict[str, WorkerId]) -> set[str]:
    return {span for span, worker in after.items() if before[span] != worker}


@pytest.mark.parametrize(
    "spans", [("1:1",), ("2:2",), ("3:output",), ("1:1", "2:2", "3:output")], ids=" ".join
)
async def test_killed_span_workers_of_three_change_no_answer(
    forward: SpanFleet, spans: tuple[str, ...]
) -> None:
    before = forward.route()
    await compare_disturbed_streams(forward, kill_workers(forward, *spans))
    assert moved_spans(before, forward.route()) == set(spans)


@pytest.mark.parametrize("spans", [("0:0",), ("1:1",), ("0:0", "1:1")], ids=" ".join)
async def test_killed_span_workers_before_the_anchor_change_no_answer(
    reverse: SpanFleet, spans: tuple[str, ...]
) -> None:
    before = reverse.route()
    await compare_disturbed_streams(reverse, kill_workers(reverse, *spans))
    assert moved_spans(before, reverse.route()) == set(spans)


async def test_large_rows_between_processes_are_read_by_nixl(reverse: SpanFleet) -> None:
    """Large hidden states between processes are read by NIXL. The log line of a closed connection
    has the number of blocks that NIXL read, per direction.
    """
    await compare_disturbed_streams(reverse, kill_workers(reverse, "1:1"))

    def counts() -> list[int]:
        found = re.findall(
            r"NIXL read (\d+) blocks from \S+ and (\d+) for it", reverse.up.running.output()
        )
        return [sum(int(pair[way]) for pair in found) for way in (0, 1)]

    wait_until(lambda: all(counts()), "blocks of a closed connection")


async def test_killed_anchor_leaves_span_workers_loaded(forward: SpanFleet) -> None:
    """A killed anchor leaves its span workers loaded: the next anchor resumes with the same
    processes, which keep their loaded spans.
    """
    (anchor,), before = forward.anchors, forward.route()
    num_loads = forward.up.running.output().count("loading layers")

    def kill() -> None:
        process_of(anchor).kill()
        wait_unlisted(forward.control, anchor)

    await compare_disturbed_streams(forward, kill)
    assert forward.anchors != [anchor] and forward.route() == before
    assert forward.up.running.output().count("loading layers") == num_loads


@pytest.mark.parametrize("span", ["0:0", "1:1"])
async def test_frozen_span_worker_is_replaced_and_joins_again(
    reverse: SpanFleet, span: str
) -> None:
    """A frozen span worker is replaced and joins again: SIGSTOP until a route without it is set up,
    then SIGCONT while the answers continue.
    """
    before = reverse.route()
    frozen = before[span]

    def freeze() -> None:
        process_of(frozen).suspend()
        try:
            wait_unlisted(reverse.control, frozen)
            wait_until(
                lambda: frozen not in reverse.route().values(), "a route without it", PATIENCE_S
            )
        finally:
            process_of(frozen).resume()

    await compare_disturbed_streams(reverse, freeze)
    assert moved_spans(before, reverse.route()) == {span}
    reverse.wait_complete(1, 3)
    assert place_of(frozen) in [place_of(worker) for worker in reverse.span_workers]
    assert process_of(reverse.route()[span]).is_running()


async def test_span_worker_that_stops_is_replaced_before_it_ends(reverse: SpanFleet) -> None:
    """A span worker that is stopped by SIGTERM is replaced before it ends. Its keeper ends with it,
    so that the test starts another process in its place.
    """
    before = reverse.route()

    def terminate() -> None:
        process_of(before["1:1"]).terminate()
        wait_unlisted(reverse.control, before["1:1"])

    await compare_disturbed_streams(reverse, terminate)
    assert moved_spans(before, reverse.route()) == {"1:1"} and not reverse.num_deaths()
    reverse.start_worker()
    reverse.wait_complete(1, 3)


async def test_drained_span_worker_is_replaced_while_it_computes(reverse: SpanFleet) -> None:
    """A drained span worker is replaced while it computes. Meanwhile no other worker can be
    drained, since no worker is left to replace it.
    """
    before = reverse.route()
    drained, other = before["0:0"], before["1:1"]

    def drain() -> None:
        reverse.order(drained, "drain").raise_for_status()
        wait_until(
            lambda: moved_spans(before, reverse.route()) == {"0:0"},
            "a route without the drained worker",
            PATIENCE_S,
        )

    await compare_disturbed_streams(reverse, drain)
    assert drained in reverse.span_workers and not reverse.num_deaths()
    for action in ("drain", "stop"):
        refused = reverse.order(other, action)
        assert (
            refused.status_code == 409
            and f"start one with `fleet worker {SPAN_ROLE}`" in refused.text
        )
    reverse.order(drained, "resume").raise_for_status()
    await compare_disturbed_streams(reverse, lambda: None)
    assert other in reverse.route().values()


async def test_span_worker_ordered_to_stop_ends_once_it_is_replaced(reverse: SpanFleet) -> None:
    before = reverse.route()
    stopped = process_of(before["0:0"])

    def stop() -> None:
        reverse.order(before["0:0"], "stop").raise_for_status()
        wait_until(lambda: not stopped.is_running(), "its process to end", PATIENCE_S)

    await compare_disturbed_streams(reverse, stop)
    assert moved_spans(before, reverse.route()) == {"0:0"} and not reverse.num_deaths()
    reverse.start_worker()
    reverse.wait_complete(1, 3)


async def test_killed_conductor_and_restarted_redis_change_no_answer(forward: SpanFleet) -> None:
    def kill_conductor() -> None:
        leader = WorkerId(text(forward.control.get(keys.CONDUCTOR)).partition("|")[0])
        process_of(leader).kill()

    await compare_disturbed_streams(forward, kill_conductor)

    def kill_redis() -> None:
        psutil.Process(forward.control.info("server")["process_id"]).kill()
        wait_until(
            lambda: redis_answers(forward.up.redis_url), "Redis to be started again", PATIENCE_S
        )

    await compare_disturbed_streams(forward, kill_redis)


async def test_requests_wait_while_layers_are_missing(forward: SpanFleet) -> None:
    """Requests sent while layers are missing are claimed by no worker, and answered once the layers
    are there.
    """
    layer = "no span worker has layer 2 of lm"
    (anchor,) = forward.anchors

    def reads_no_grants() -> bool:
        readers = cast(
            "list[dict[str, object]]",
            forward.control.xinfo_consumers(keys.role(RoleName(STAGE)), keys.IDLE_GROUP),
        )
        return all(
            int(text(each["idle"])) > 4 * IDLE_BLOCK_MS
            for each in readers
            if text(each["name"]) == anchor
        )

    def is_waiting() -> bool:
        assert not forward.control.scard(keys.worker_tasks(anchor))
        return forward.control.scard(keys.LIVE) == NUM_STREAMS

    with forward.no_starts() as config_file:
        kill_workers(forward, "2:2")()
        wait_until(reads_no_grants, "the anchor to read no grants", PATIENCE_S)
        answers = asyncio.create_task(compare_disturbed_streams(forward, lambda: None))
        await asyncio.to_thread(wait_until, is_waiting, "every request to wait", PATIENCE_S)
        body = httpx.get(f"{forward.up.url}/ready", timeout=30).json()
        assert body["missing"] == [SPAN_ROLE] and layer in body["error"]["message"]
        shown = run_cli("status", "--config", str(config_file), cwd=forward.up.folder).stdout
        assert f"{SPAN_ROLE} ({layer})" in " ".join(shown.split())
    await answers
    assert httpx.get(f"{forward.up.url}/ready", timeout=30).json()["ready"]


async def test_tasks_of_a_killed_anchor_continue_on_another(two_anchors: SpanFleet) -> None:
    """Tasks of a killed anchor continue on another anchor, which has a separate chain; the killed
    anchor is not restarted meanwhile.
    """
    routes = two_anchors.live_routes()
    assert len({worker for route in routes for worker in route.values()}) == 2
    killed, other = two_anchors.anchors

    def kill() -> None:
        process_of(killed).kill()
        wait_unlisted(two_anchors.control, killed)

    with two_anchors.no_starts():
        await compare_disturbed_streams(two_anchors, kill)
        assert two_anchors.anchors == [other]
    two_anchors.wait_complete(2, 2)


async def test_tasks_of_an_anchor_without_layers_continue_on_another(
    two_anchors: SpanFleet,
) -> None:
    routes = {anchor: two_anchors.route_of(anchor) for anchor in two_anchors.anchors}
    left: list[WorkerId] = []

    def kill() -> None:
        """Kill the layers of an anchor that has tasks; an anchor without tasks would wait for the
        next span worker. The anchor is frozen meanwhile, so that it does not end its tasks.
        """
        for anchor, route in routes.items():
            (lost,) = route.values()
            process_of(anchor).suspend()
            has_tasks = bool(two_anchors.control.scard(keys.worker_tasks(anchor)))
            if has_tasks:
                process_of(lost).kill()
            process_of(anchor).resume()
            if has_tasks:
                left.append(anchor)
                wait_unlisted(two_anchors.control, lost, anchor)
                return
        raise AssertionError("no anchor has a task while an answer is read")

    with two_anchors.no_starts():
        await compare_disturbed_streams(two_anchors, kill)
        (other,) = routes.keys() - set(left)
        assert two_anchors.route_of(other) == routes[other]
    two_anchors.wait_complete(2, 2)


def assert_saved(saves: DisturbedSaves, num_faults: int) -> None:
    """Check that each save was complete or failed with an error that gives the reason, and that the
    last files were loaded again.
    """
    report = saves.report
    assert report is not None and not report.wrong and report.whole and report.struck >= num_faults
    reasons = set(report.struck_failed) | set(report.unstruck_failed)
    assert all(
        re.match(
            "(session_interrupted|span_prefix_mismatch|span_unreachable"
            "|not_found|invalid_value): .",
            each,
        )
        for each in reasons
    )


def test_conversations_are_saved_whole_or_not_at_all_while_workers_are_killed(
    forward: SpanFleet, tmp_path: Path
) -> None:
    def kill(worker: WorkerId) -> None:
        process_of(worker).kill()
        wait_unlisted(forward.control, worker)

    saves = DisturbedSaves(forward, tmp_path)
    with saves.running():
        for role in (SPAN_ROLE, STAGE):
            saves.strike(role, kill)
            forward.wait_complete(1, 3)
        saves.await_next()
    assert_saved(saves, 2)


def test_conversations_are_saved_whole_or_not_at_all_while_workers_are_frozen(
    reverse: SpanFleet, tmp_path: Path
) -> None:
    def freeze(worker: WorkerId) -> None:
        process_of(worker).suspend()
        try:
            wait_unlisted(reverse.control, worker)
        finally:
            process_of(worker).resume()

    saves = DisturbedSaves(reverse, tmp_path)
    with saves.running():
        for role in (SPAN_ROLE, STAGE):
            saves.strike(role, freeze)
            reverse.wait_complete(1, 3)
        saves.await_next()
    assert_saved(saves, 2)
