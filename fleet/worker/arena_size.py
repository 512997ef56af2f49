"""Size of a worker's transfer arena: room for tensors and, on a split stage, for the keys and
values of the longest prompt.
"""

from dataclasses import dataclass

from fleet.config import FleetConfig
from fleet.config.schema import ARENA_MIB, REQUEST_CAP_MIB
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.engine.base import Engine
from fleet.stages.base import BuiltStage
from fleet.transfer.arena import ALIGN_BYTES
from fleet.transfer.memory import stored_bytes

MIB = 1 << 20
NUM_HAND_OFFS = 2
"""Number of hand-offs of the longest prompt for which a default arena has room: one is read while
the next is written.
"""
MAX_INLINE_BYTES = 512 * MIB
"""The longest value that Redis accepts by default (`proto-max-bulk-len`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSize:
    """Sizes of a worker's transfer arena. Units: bytes. `request_cap_bytes`: the largest part that
    one request may use; `hand_off_bytes`: keys and values of the longest prompt, 0 without a split.
    """

    arena_bytes: int
    request_cap_bytes: int
    hand_off_bytes: int = 0


def arena_size(config: FleetConfig, stage: StageName, built: BuiltStage) -> ArenaSize:
    """Return the arena sizes of a stage's worker: configured ones, or defaults. Raises: ConfigError
    if an arena cannot hold a copy of the longest prompt's keys and values.

    A copy is needed even where peers read each other's pages in place: for a request of a
    conversation, or if pages are short.
    """
    given, num_rows = config.transfer, config.limits.max_prompt_tokens + built.num_added_rows
    is_split = config.stage(stage).split is not None
    data_bytes = _hand_off_bytes(built.engine, num_rows) if is_split else 0
    slot_bytes = stored_bytes(data_bytes) + ALIGN_BYTES if data_bytes else 0
    arena = (
        given.arena_mib * MIB if given.arena_mib else ARENA_MIB * MIB + NUM_HAND_OFFS * slot_bytes
    )
    cap = (
        given.request_cap_mib * MIB
        if given.request_cap_mib
        else min(arena, max(REQUEST_CAP_MIB * MIB, slot_bytes))
    )
    for name, size in (("arena_mib", given.arena_mib), ("request_cap_mib", given.request_cap_mib)):
        if size is not None and size * MIB < slot_bytes:
            raise _refusal(config, stage, built, name, size, slot_bytes)
    return ArenaSize(arena_bytes=arena, request_cap_bytes=cap, hand_off_bytes=data_bytes)


def _hand_off_bytes(engine: Engine, num_rows: int) -> int:
    pages = engine.kv.pages if engine.kv is not None else None
    return pages.num_bytes(num_rows) if pages is not None else 0


def _refusal(
    config: FleetConfig, stage: StageName, built: BuiltStage, name: str, size: int, slot_bytes: int
) -> ConfigError:
    page_bytes, page_size = _hand_off_bytes(built.engine, 1), config.stage(stage).page_size_tokens
    held = (
        size * MIB - stored_bytes(0) - ALIGN_BYTES
    ) // page_bytes * page_size - built.num_added_rows
    limit = f", or limits.max_prompt_tokens to at most {held}" if held > 0 else ""
    message = (
        f"transfer.{name}: {size} MiB holds the keys and values of a prompt of {max(held, 0)} "
        f"tokens in {stage}, and "
        f"limits.max_prompt_tokens is {config.limits.max_prompt_tokens}; set at least "
        f"{-(-slot_bytes // MIB)} or null{limit}"
    )
    return ConfigError(message, param=f"transfer.{name}")


def check_inline(config: FleetConfig, size: ArenaSize) -> None:
    """Check that a hand-off fits into a Redis value, for a transfer that sends tensors through
    Redis. Raises: ConfigError.
    """
    if size.hand_off_bytes > MAX_INLINE_BYTES:
        message = (
            "transfer.kind: keys and values of limits.max_prompt_tokens "
            f"({config.limits.max_prompt_tokens}) are "
            f"{size.hand_off_bytes // MIB} MiB, and Redis accepts {MAX_INLINE_BYTES // MIB} in "
            "one value; use nixl, or lower it"
        )
        raise ConfigError(message, param="transfer.kind")
