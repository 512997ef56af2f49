"""Serving benchmark: the same bounded, greedy requests one at a time, then concurrently. Takes the
stages from the graph.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from fleet.config import FleetConfig
from fleet.core.ids import StageName, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.lab.client.chat import (
    AudioContent,
    ChatCall,
    ChatMessage,
    ChatStreamOptions,
    EncodedAudio,
    OutputAudio,
    StageBounds,
)
from fleet.lab.client.client import ApiClient
from fleet.lab.measure.deployment import TargetFleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import LoadPhase, run_phase, with_background_load
from fleet.lab.measure.measurement import BenchOptions, Context
from fleet.lab.measure.prompts import pick
from fleet.lab.measure.reference import ReferenceWork
from fleet.processing import ChatRequest, Frontend, Message, TextPart, open_frontend

SINGLE, CONCURRENT = "single stream", "concurrent"
ANSWER_MEDIA = frozenset({"text", "audio"})
"""Media that a chat may ask for; a graph may have others, such as the transcript of its prompt."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the sequential and of the concurrent phase. `prompts`: the prompts of both phases,
    to which the results refer by index.
    """

    url: str
    model: str
    graph: str
    bounds: StageBounds
    prompts: tuple[str, ...]
    single: LoadPhase
    concurrent: LoadPhase


def stage_bounds(config: FleetConfig, max_tokens: int, frames: int) -> StageBounds:
    """Return the `fleet` section of a request: every sampling stage is greedy and has a length
    limit, `max_tokens` for the main stage and `frames` for the others.
    """
    stages = config.graph_declaration().stages
    return {
        stage.name: {"max_tokens": max_tokens if stage.main else frames, "temperature": 0.0}
        for stage in stages
        if stage.main or stage.default_sampling
    }


def measure_serving(target: TargetFleet, context: Context) -> Serving:
    """Run the serving benchmark: warm up, then send one request at a time, then `concurrency` at a
    time. Raises: ApiError, BenchError.
    """
    api, config, options = target.api, target.config, context.options
    model = api.model()
    _check_stages(api, config)
    bounds = stage_bounds(config, options.max_tokens, options.frames)
    prompts = pick(max(options.requests, options.concurrency))
    bodies = [encode_call(model, prompt, config, bounds) for prompt in prompts]

    def measure(name: str, label: str, sent: Sequence[bytes], concurrency: int) -> LoadPhase:
        step = context.steps(label, len(sent))
        return with_background_load(
            options.up, lambda: run_phase(name, api, sent, concurrency, step)
        )

    warm_up = [bodies[index % len(bodies)] for index in range(options.warm_up)]
    if warm_up:
        measure("warm-up", "warm-up", warm_up, 1)
        measure("warm-up", "warm-up, concurrent", warm_up * 2, options.concurrency)
    many = f"{options.concurrency} at a time"
    return Serving(
        url=api.url,
        model=model,
        graph=config.graph,
        bounds=bounds,
        prompts=tuple(prompts),
        single=measure(SINGLE, "one at a time", bodies[: options.requests], 1),
        concurrent=measure(CONCURRENT, many, bodies, options.concurrency),
    )


def _check_stages(api: ApiClient, config: FleetConfig) -> None:
    """Check that the fleet serves the graph of the configuration, since requests name its stages.
    Raises: BenchError.
    """
    roles = api.roles()
    if not {role.name for role in config.roles()} <= roles:
        served = ", ".join(sorted(roles))
        raise BenchError(
            f"{api.url} serves the roles {served}, not the graph {config.graph}; name its graph "
            "with --set graph=NAME "
            "or --config FILE",
            param="--config",
        )


def encode_call(
    model: str,
    prompt: str | EncodedAudio,
    config: FleetConfig,
    bounds: StageBounds,
    *,
    media: Sequence[str] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    stream_options: ChatStreamOptions | None = None,
    conversation: str | None = None,
    store: bool = True,
) -> bytes:
    """Encode a streamed chat request, greedy by default. `prompt`: typed or spoken question.
    `media`: output media, by default all that the graph answers with.

    `conversation`: key of the conversation to which the turn belongs, None without one. `store`:
    False to exclude the answer from hidden-state samples.
    Raises: BenchError for a medium that the graph does not produce.
    """
    produced = ANSWER_MEDIA.intersection(config.graph_declaration().media.values())
    media = sorted(produced if media is None else media, reverse=True)
    if not set(media) <= produced:
        raise BenchError(
            f"graph {config.graph} answers with {', '.join(sorted(produced))}, not with "
            f"{', '.join(media)}"
        )
    content = prompt if isinstance(prompt, str) else (AudioContent(input_audio=prompt),)
    call = ChatCall(
        model=model,
        messages=(ChatMessage(role="user", content=content),),
        modalities=tuple(media),
        audio=OutputAudio(format="pcm16") if "audio" in media else UNSET,
        stream=True,
        stream_options=stream_options or ChatStreamOptions(),
        temperature=temperature,
        seed=seed,
        prompt_cache_key=conversation or UNSET,
        store=UNSET if store else False,
        fleet=bounds,
    )
    return msgspec.json.encode(call)


def local_checkpoint(config: FleetConfig) -> Path:
    """Return the folder of the fleet's checkpoint. Raises: BenchError if it is not on this
    machine.
    """
    checkpoint = Path(config.checkpoint)
    if not checkpoint.is_dir():
        raise BenchError(
            "a comparison needs the fleet's checkpoint on this machine, and "
            f"{config.checkpoint!r} is not a folder; "
            "name it with --set checkpoint=DIR, or use --up",
            param="--set",
        )
    return checkpoint


def prepare(
    target: TargetFleet,
    options: BenchOptions,
    prompts: tuple[str, ...],
    num_threads: tuple[int, ...],
) -> tuple[ReferenceWork, Frontend]:
    """Prepare the measured prompts for the reference implementation as the gateway would; return
    the requests and the frontend that prepared them.

    Raises: BenchError if the fleet's checkpoint is not on this machine; ConfigError if the
    checkpoint lacks a file.
    """
    config = target.config
    frontend = open_frontend(config, local_checkpoint(config))
    requests = tuple(_spec(config, frontend, options, prompt) for prompt in prompts)
    work = ReferenceWork(
        requests=requests,
        messages=tuple([{"role": "user", "content": prompt}] for prompt in prompts),
        num_threads=num_threads,
        device=config.device,
        dtype=config.dtype,
        warm_up=options.warm_up,
        sample_rate_hz=frontend.sample_rate_hz,
    )
    return work, frontend


def _spec(
    config: FleetConfig, frontend: Frontend, options: BenchOptions, prompt: str
) -> RequestSpec:
    graph = config.graph_declaration()
    bounds = stage_bounds(config, options.max_tokens, options.frames)
    sampling: dict[StageName, Sampling] = {}
    for stage in graph.stages:
        defaults = {
            **stage.default_sampling,
            **frontend.sampling().get(stage.name, {}),
            **config.stage(stage.name).sampling,
        }
        fields = {**defaults, **bounds.get(stage.name, {})}
        sampling[stage.name] = msgspec.convert(fields, Sampling)
    chat = ChatRequest(
        id=new_request_id(),
        graph=graph.name,
        messages=(Message(role="user", content=TextPart(text=prompt, where="messages")),),
        outputs=tuple(graph.media),
        sampling=sampling,
        spoken="audio" in graph.media.values(),
    )
    return frontend.prepare(chat)[0]
