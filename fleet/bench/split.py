"""Two deployments of one model: prefill and decode together, and split. What is compared with what; measures nothing. Pure.

Knows stages only as declared: whichever has more than one walk can be split.
"""

from collections.abc import Sequence

import msgspec

from fleet.bench.chat import ChatBody
from fleet.bench.errors import BenchError
from fleet.bench.serving import chat_of, stage_bounds
from fleet.config import FleetConfig
from fleet.core.ids import StageName

TINY = "checkpoint=tiny"


def with_checkpoint(config: FleetConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Random weights where none were named: they take as long as trained ones of their size."""
    return (*overrides, TINY) if config.checkpoint == "auto" else tuple(overrides)


def split_stages(config: FleetConfig) -> tuple[StageName, ...]:
    return tuple(stage.name for stage in config.graph_declaration().stages if len(config.roles_of(stage.name)) > 1)


def split(config: FleetConfig) -> tuple[str, ...]:
    """What splits every stage that can be, for a deployment that splits none; nothing for another."""
    if split_stages(config):
        return ()
    halves = [stage.name for stage in config.graph_declaration().stages if len(stage.walks) > 1]
    return tuple(f"stages.{name}.split.{half}.replicas=1" for name in halves for half in ("prefill", "decode"))


def together(config: FleetConfig) -> tuple[str, ...]:
    """What makes of a split deployment one with as many workers and nothing split."""
    overrides: list[str] = []
    for name in split_stages(config):
        workers = sum(role.replicas for role in config.roles_of(name))
        overrides += [f"stages.{name}.split=null", f"stages.{name}.replicas={workers}"]
    return tuple(overrides)


def num_workers(config: FleetConfig) -> int:
    return sum(role.replicas for role in config.roles())


def body_of(model: str, prompt: str, config: FleetConfig, *, max_tokens: int, frames: int, media: Sequence[str]) -> bytes:
    """A streamed, greedy request for some of the graph's media. Raises: BenchError for a medium it does not have."""
    known = set(config.graph_declaration().media.values())
    if not set(media) <= known:
        raise BenchError(f"graph {config.graph} answers with {', '.join(sorted(known))}, not with {', '.join(media)}")
    body = ChatBody(
        model=model,
        messages=chat_of(prompt),
        modalities=sorted(media, reverse=True),
        audio={"format": "pcm16"} if "audio" in media else None,
        fleet=stage_bounds(config, max_tokens, frames),
    )
    return msgspec.json.encode(body)
