"""Measuring a fleet through its API: the same bounded, greedy requests alone and together. Knows stages only as declared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleet.bench.chat import ChatApi, ChatBody
from fleet.bench.deployment import TargetFleet
from fleet.bench.errors import BenchError
from fleet.bench.load import Advance, Phase, run_phase
from fleet.bench.options import BenchOptions
from fleet.bench.prompts import pick
from fleet.bench.reference import ReferenceWork
from fleet.config import FleetConfig
from fleet.core.ids import StageName, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.processing import ChatRequest, Frontend, Message, TextPart, load_frontend
from fleet.reporting.background_load import BackgroundLoad

SINGLE, CONCURRENT = "single stream", "concurrent"

Bounds = dict[str, dict[str, int | float]]
Steps = Callable[[str, int], Advance]
"""(what, how many) -> what to call after each: the progress display."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of one fleet, and the prompts they sent, by index."""

    url: str
    model: str
    graph: str
    bounds: Bounds
    prompts: tuple[str, ...]
    single: Phase
    concurrent: Phase


def stage_bounds(config: FleetConfig, max_tokens: int, frames: int) -> Bounds:
    """The `fleet` section of a request: every stage that samples is greedy and bounded, the main one by `max_tokens`."""
    stages = config.graph_declaration().stages
    return {
        stage.name: {"max_tokens": max_tokens if stage.main else frames, "temperature": 0.0}
        for stage in stages
        if stage.main or stage.default_sampling
    }


def chat_of(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def measure_serving(api: ChatApi, config: FleetConfig, options: BenchOptions, steps: Steps) -> Serving:
    """Warm up, then one request at a time, then many. Raises: BenchError."""
    model = api.model()
    _check_stages(api, config)
    bounds = stage_bounds(config, options.max_tokens, options.frames)
    prompts = pick(max(options.requests, options.concurrency))
    bodies = [_body(model, prompt, config, bounds) for prompt in prompts]
    alone, warm_up = bodies[: options.requests], [bodies[index % len(bodies)] for index in range(options.warm_up)]
    if warm_up:
        run_phase("warm-up", api, warm_up, 1, steps("warm-up", len(warm_up)))
        run_phase("warm-up", api, warm_up * 2, options.concurrency, steps("warm-up, many at a time", len(warm_up) * 2))
    single = _measured(SINGLE, api, alone, 1, options, steps("one at a time", len(alone)))
    together = steps(f"{options.concurrency} at a time", len(bodies))
    return Serving(
        url=api.url,
        model=model,
        graph=config.graph,
        bounds=bounds,
        prompts=tuple(prompts),
        single=single,
        concurrent=_measured(CONCURRENT, api, bodies, options.concurrency, options, together),
    )


def _measured(name: str, api: ChatApi, bodies: Sequence[bytes], concurrency: int, options: BenchOptions, step: Advance) -> Phase:
    neighbours = BackgroundLoad()
    phase = run_phase(name, api, bodies, concurrency, step)
    return msgspec.structs.replace(phase, others_cores=neighbours.cores() if options.up else None)


def _check_stages(api: ChatApi, config: FleetConfig) -> None:
    """The options' deployment must be the fleet's, or its bounds would name stages that are not there."""
    roles = api.roles()
    ours = {role.name for role in config.roles()}
    if not ours <= roles:
        theirs = ", ".join(sorted(roles))
        raise BenchError(
            f"{api.url} serves the roles {theirs}, not the graph {config.graph}; name its graph with --set graph=NAME "
            "or --config FILE",
            param="--config",
        )


def _body(model: str, prompt: str, config: FleetConfig, bounds: Bounds) -> bytes:
    media = set(config.graph_declaration().media.values())
    body = ChatBody(
        model=model,
        messages=chat_of(prompt),
        modalities=sorted(media, reverse=True),
        audio={"format": "pcm16"} if "audio" in media else None,
        fleet=bounds,
    )
    return msgspec.json.encode(body)


def local_checkpoint(config: FleetConfig) -> Path:
    """Raises: BenchError if the fleet's checkpoint is not on this machine."""
    checkpoint = Path(config.checkpoint)
    if not checkpoint.is_dir():
        raise BenchError(
            f"comparing needs the fleet's checkpoint here, and {config.checkpoint!r} is no folder; "
            "name it with --set checkpoint=DIR, or use --up",
            param="--set",
        )
    return checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The measured prompts as the gateway turns them into requests, for something else to answer."""

    work: ReferenceWork
    frontend: Frontend


def prepare(target: TargetFleet, options: BenchOptions, prompts: tuple[str, ...], num_threads: tuple[int, ...]) -> Prepared:
    """Raises: BenchError if the fleet's checkpoint is not on this machine; ConfigError if it lacks something."""
    config = target.config
    frontend = load_frontend(config.graph_declaration().frontend, local_checkpoint(config), config.limits)
    requests = tuple(_spec(config, frontend, options, prompt) for prompt in prompts)
    work = ReferenceWork(
        requests=requests,
        messages=tuple(chat_of(prompt) for prompt in prompts),
        num_threads=num_threads,
        device=config.device,
        dtype=config.dtype,
        warm_up=options.warm_up,
        sample_rate_hz=frontend.sample_rate_hz,
    )
    return Prepared(work=work, frontend=frontend)


def _spec(config: FleetConfig, frontend: Frontend, options: BenchOptions, prompt: str) -> RequestSpec:
    graph = config.graph_declaration()
    bounds = stage_bounds(config, options.max_tokens, options.frames)
    sampling: dict[StageName, Sampling] = {}
    for stage in graph.stages:
        given = {**stage.default_sampling, **frontend.sampling().get(stage.name, {}), **config.stage(stage.name).sampling}
        fields = {**given, **bounds.get(stage.name, {})}
        sampling[stage.name] = msgspec.convert(fields, Sampling)
    chat = ChatRequest(
        id=new_request_id(),
        graph=graph.name,
        messages=tuple(
            Message(role=message["role"], content=TextPart(text=message["content"], where="messages"))
            for message in chat_of(prompt)
        ),
        outputs=tuple(graph.media),
        sampling=sampling,
        spoken="audio" in graph.media.values(),
    )
    return frontend.prepare(chat)[0]
