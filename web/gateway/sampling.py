"""Resolution of the sampling parameters of each stage. Later sources override earlier ones:
declaration of the graph, checkpoint, deployment, request, `fleet` section of the request.

Knows stages only by what the graph declares of them.
"""

import secrets
from collections.abc import Mapping

import msgspec

from fleet.config.schema import FleetConfig
from fleet.core.errors import SHOWN_CHARS, BadInput, ConfigError
from fleet.core.ids import StageName
from fleet.core.request import Sampling
from fleet.graphs import Stage
from web.schema.chat import MAX_SEED, AnswerOptions, SamplingFields, StageFields

Value = float | int | tuple[str, ...]
_FIELDS = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    ),
    *("max_tokens", "min_tokens", "ignore_eos"),
)


def new_seed() -> int:
    """Return a random seed that every JSON reader represents exactly."""
    return secrets.randbelow(2**32)


def stage_defaults(
    config: FleetConfig, of_checkpoint: Mapping[str, Mapping[str, float | int]]
) -> dict[StageName, Sampling]:
    """Return the default sampling of each stage. `of_checkpoint` holds the checkpoint's defaults,
    as the frontend reads them.

    Raises: ConfigError if the deployment's `stages.NAME.sampling` has an unknown field or a value
    out of range.
    """
    defaults: dict[StageName, Sampling] = {}
    for stage in config.graph_declaration().stages:
        given = {
            **stage.default_sampling,
            **of_checkpoint.get(stage.name, {}),
            **config.stage(stage.name).sampling,
        }
        try:
            StageFields.model_validate(given)
            sampling = msgspec.convert(given, Sampling, strict=True)
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"stages.{stage.name}.sampling: {error}", param=f"stages.{stage.name}.sampling"
            ) from error
        if stage.main:
            bound = min(sampling.max_tokens, config.limits.max_answer_tokens)
            sampling = msgspec.structs.replace(sampling, max_tokens=bound)
        defaults[stage.name] = sampling
    return defaults


def resolve_sampling(
    body: AnswerOptions,
    config: FleetConfig,
    defaults: Mapping[StageName, Sampling],
    stages: tuple[StageName, ...],
    seed: int,
) -> dict[StageName, Sampling]:
    """Return the sampling of each of `stages` for a request; `seed` is the request's seed.

    The temperature of a request applies to every stage that samples, its seed to every stage, its
    other fields to the main stage.
    Raises: BadInput naming an unknown stage, or a value beyond the deployment's limits.
    """
    graph = config.graph_declaration()
    sections = body.fleet or {}
    known = {stage.name for stage in graph.stages}
    for name in sections:
        if name not in known:
            param = f"fleet.{name[:SHOWN_CHARS]}"
            raise BadInput(
                f"{param}: no such stage; use one of {', '.join(sorted(known))}", param=param
            )
    resolved: dict[StageName, Sampling] = {}
    for stage in graph.stages:
        if stage.name not in stages:
            continue
        values = {"seed": seed, **_request_values(body, stage)}
        section = sections.get(stage.name)
        where, _ = body.length_limit
        where_min = "min_tokens"
        if section is not None:
            _check_section(section, stage)
            values |= _set_values(section)
            where = where if section.max_tokens is None else f"fleet.{stage.name}.max_tokens"
            where_min = (
                where_min if section.min_tokens is None else f"fleet.{stage.name}.min_tokens"
            )
        _check_bound(values, stage, config, defaults[stage.name], where)
        sampling = msgspec.structs.replace(defaults[stage.name], **values)
        if sampling.min_tokens > sampling.max_tokens:
            reason = (
                f"{sampling.min_tokens} is more than the answer's limit of {sampling.max_tokens}"
            )
            raise BadInput(f"{where_min}: {reason}; lower it, or raise max_tokens", param=where_min)
        resolved[stage.name] = sampling
    return resolved


def _check_section(section: StageFields, stage: Stage) -> None:
    """Check that a section sets only fields that its stage uses; every stage uses a seed. Raises:
    BadInput naming the field.
    """
    if stage.main:
        return
    samples = bool(stage.default_sampling)
    reason = "writes no text that could stop" if samples else "samples nothing"
    unused = ("stop",) if samples else (*_FIELDS, "stop")
    for name in unused:
        if getattr(section, name) not in (None, []):
            where = f"fleet.{stage.name}.{name}"
            raise BadInput(f"{where}: the stage {stage.name} {reason}; remove it", param=where)


def request_seed(body: AnswerOptions) -> int:
    return body.seed if body.seed is not None else new_seed()


def _request_values(body: AnswerOptions, stage: Stage) -> dict[str, Value]:
    if stage.main:
        values = _set_values(body)
        _, max_tokens = body.length_limit
        if max_tokens is not None:
            values["max_tokens"] = max_tokens
        return values
    if body.temperature is not None and "temperature" in stage.default_sampling:
        return {"temperature": body.temperature}
    return {}


def _set_values(fields: SamplingFields) -> dict[str, Value]:
    values: dict[str, Value] = {
        name: value for name in _FIELDS if (value := getattr(fields, name)) is not None
    }
    if fields.top_k is not None:
        values["top_k"] = max(fields.top_k, 0)
    if fields.seed is not None:
        values["seed"] = min(fields.seed, MAX_SEED)
    if fields.stop is not None:
        values["stop"] = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    return values


def _check_bound(
    values: Mapping[str, Value], stage: Stage, config: FleetConfig, default: Sampling, where: str
) -> None:
    limit = config.limits.max_answer_tokens
    if not stage.main:
        limit = max(limit, default.max_tokens)
    wanted = values.get("max_tokens", 0)
    if isinstance(wanted, int) and wanted > limit:
        raise BadInput(f"{where}: {wanted} is beyond this server's limit of {limit}", param=where)
