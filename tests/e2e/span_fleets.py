"""A process fleet whose language model is divided among an anchor and span workers, and answers of
it that a test disturbs.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis

from fleet.config import FleetConfig
from fleet.config.roles import SPAN, part_role_name
from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.control.dead_letters import read_letters
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId, new_request_id, role_of
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import GRAPHS
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from tests.e2e.fleets import PATIENCE_S, ProcessFleet, fleet_up, worker_ids
from tests.harness import (
    EdgeArrays,
    answer,
    answer_disturbed,
    assert_same,
    gateway_at,
    in_step,
    wait_none_live,
)
from tests.support import start_cli, wait_until

STAGE, SPAN_ROLE = StageName("lm"), RoleName("lm.span")
NUM_STREAMS, NUM_TOKENS, DISTURBED_AT = 8, 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFleet:
    """A running `fleet up` whose stage `stage` is divided among span workers.

    `expected`: answers of the undisturbed fleet, by seed. `extras`: exit stack that stops the
    workers of `start_worker`. `requests`: ids of the requests answered last.
    """

    up: ProcessFleet
    config: FleetConfig
    control: redis.Redis
    extras: ExitStack
    stage: StageName = STAGE
    expected: dict[int, EdgeArrays] = field(default_factory=dict[int, EdgeArrays])
    requests: list[RequestId] = field(default_factory=list[RequestId])

    @property
    def span_role(self) -> RoleName:
        return part_role_name(self.stage, SPAN)

    @property
    def anchors(self) -> list[WorkerId]:
        return sorted(
            worker for worker in worker_ids(self.control) if role_of(worker) == self.stage
        )

    @property
    def span_workers(self) -> list[WorkerId]:
        """Return the listed span workers."""
        return sorted(
            worker for worker in worker_ids(self.control) if role_of(worker) == self.span_role
        )

    def route_of(self, anchor: WorkerId) -> dict[str, WorkerId]:
        """Return the span workers of an anchor's last route, by span, in layer order."""
        hops = json.loads(text(self.control.hget(keys.worker(anchor), "route")) or "[]")
        return {span: WorkerId(worker) for worker, span in hops}

    def live_routes(self) -> list[dict[str, WorkerId]]:
        """Return the routes whose workers are all listed."""
        listed = worker_ids(self.control)
        routes = [self.route_of(anchor) for anchor in self.anchors]
        return [route for route in routes if route and set(route.values()) <= listed]

    def route(self) -> dict[str, WorkerId]:
        """Return the only anchor's route, once its workers are all listed."""
        (route,) = wait_until(self.live_routes, "a route of listed workers", PATIENCE_S)
        return route

    def start_worker(self) -> None:
        """Start a span worker, with a keeper, in addition to the ones of `fleet up`."""
        self.extras.enter_context(
            start_cli("worker", self.span_role, "--keep", cwd=self.up.folder, env=self.up.env)
        )

    def order(self, worker: WorkerId, action: str) -> httpx.Response:
        return httpx.post(f"{self.up.url}/v1/fleet/workers/{worker}/{action}", timeout=30)

    def num_deaths(self) -> int:
        """Return the number of deaths counted over the tasks of the last answers."""
        counts = [
            self.control.hget(keys.task(request, self.stage), "deaths") for request in self.requests
        ]
        return sum(int(text(count) or "0") for count in counts)

    @contextmanager
    def no_starts(self) -> Iterator[Path]:
        """Prevent process starts in the fleet until the end of the block; yield a configuration
        file.
        """
        good, copy = self.up.resolved.read_text(), self.up.folder / "copy.yaml"
        copy.write_text(good)
        self.up.resolved.write_text("graph: [")
        try:
            yield copy
        finally:
            self.up.resolved.write_text(good)

    def wait_complete(self, num_anchors: int, num_span_workers: int) -> None:
        """Wait until `num_anchors` anchors and `num_span_workers` span workers are listed, and each
        anchor has a route of listed workers.
        """

        def is_complete() -> bool:
            is_whole = (
                len(self.anchors) == num_anchors and len(self.span_workers) == num_span_workers
            )
            return is_whole and len(self.live_routes()) == num_anchors

        wait_until(
            is_complete,
            f"{num_anchors} anchors with routes and {num_span_workers} span workers",
            PATIENCE_S,
        )


@contextmanager
def span_fleet(
    folder: Path, anchor: str, workers: Sequence[str], *settings: str, num_layers: int = 3
) -> Iterator[SpanFleet]:
    """Run a fleet of the graph `text` with real layers, where answers are produced only as fast as
    clients read. `anchor` and `workers`: spans of their layers.
    """
    write_tiny_checkpoint(folder / "checkpoint", num_layers=num_layers)
    spans = (
        f"stages.{STAGE}.spans={{anchor: '{anchor}', workers: "
        f"[{', '.join(repr(span) for span in workers)}]}}"
    )
    with fleet_of_spans(folder, spans, *settings) as fleet:
        yield fleet


@contextmanager
def automatic_fleet(
    folder: Path, anchor: str, num_workers: int, num_layers: int
) -> Iterator[SpanFleet]:
    """Run a fleet in which `num_workers` span workers divide the layers that the anchor lacks
    automatically.
    """
    write_tiny_checkpoint(folder / "checkpoint", num_layers=num_layers)
    with fleet_of_spans(
        folder,
        f"stages.{STAGE}.spans={{anchor: '{anchor}', workers: auto, replicas: {num_workers}}}",
    ) as fleet:
        yield fleet


@contextmanager
def fleet_of_spans(folder: Path, spans: str, *settings: str) -> Iterator[SpanFleet]:
    """Run a fleet with the checkpoint in `folder`. `spans`: the setting that divides its layers."""
    common = (
        f"checkpoint={folder / 'checkpoint'}",
        "numerics=invariant",
        "transfer.kind=redis",
        "web.port=0",
    )
    with (
        fleet_up(folder, *common, *in_step(GRAPHS["text"]), spans, *settings) as up,
        connect(up.redis_url) as control,
        ExitStack() as extras,
    ):
        fleet = SpanFleet(up=up, config=up.config, control=control, extras=extras)
        roles = {role.name: role for role in fleet.config.roles()}
        span_role = roles[SPAN_ROLE]
        fleet.wait_complete(roles[RoleName(STAGE)].replicas, span_role.replicas + span_role.standby)
        yield fleet


def seeded_spec(config: FleetConfig, seed: int) -> RequestSpec:
    """Return a request for a sampled answer of `NUM_TOKENS`; the prompt length depends on
    `seed`.
    """
    return RequestSpec(
        id=new_request_id(),
        graph=config.graph,
        prompt_ids=tuple(range(5, 17 + seed)),
        outputs=tuple(GRAPHS["text"].media),
        sampling={
            STAGE: Sampling(temperature=0.9, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
        },
    )


async def answer_streams(fleet: SpanFleet, disturb: Callable[[], None]) -> list[EdgeArrays]:
    return await answer_seeds(fleet.up.redis_url, fleet.config, disturb, fleet.requests)


async def answer_seeds(
    redis_url: str, config: FleetConfig, disturb: Callable[[], None], requests: list[RequestId]
) -> list[EdgeArrays]:
    """Receive answers, `NUM_STREAMS` at a time, and return them by seed. `disturb` is called in the
    middle of the first answer. `requests`: list that receives the request ids.
    """

    def after_chunk(_edge: object, index: int) -> None:
        if index == DISTURBED_AT:
            disturb()

    async with gateway_at(redis_url, config) as client:
        specs = [seeded_spec(config, seed) for seed in range(NUM_STREAMS)]
        requests[:] = [spec.id for spec in specs]
        others = [answer(client, spec) for spec in specs[1:]]
        answers = await asyncio.gather(
            answer_disturbed(client, specs[0], None, after_chunk), *others
        )
        await wait_none_live(client)
    return list(answers)


async def compare_disturbed_streams(fleet: SpanFleet, disturb: Callable[[], None]) -> None:
    """Receive answers while `disturb` acts, and compare them with the undisturbed fleet's
    answers.
    """
    if not fleet.expected:
        undisturbed = await answer_streams(fleet, lambda: None)
        fleet.expected.update(enumerate(undisturbed))
    for seed, received in enumerate(await answer_streams(fleet, disturb)):
        assert_same(received, fleet.expected[seed])
    assert not read_letters(fleet.control)
