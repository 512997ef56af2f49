"""A worker's arena has room for the KV cache of the longest prompt."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from fleet.config import load_config
from fleet.core.errors import ConfigError
from fleet.core.ids import RequestId, StageName
from fleet.engine.base import Engine
from fleet.stages.base import AdapterFactory, BuiltStage
from fleet.transfer.arena import Arena
from fleet.transfer.memory import stored_bytes
from fleet.worker.arena_size import MIB, ArenaSize, arena_size, check_inline

STAGE = StageName("thinker")
SPLIT = "stages.thinker.split={}"
PAGE_BYTES = 16 * 48 * 2 * 4 * 128 * 2
"""Size in bytes of a KV page with 16 positions of the published Thinker in bfloat16."""


class SizedPages:
    """A KV pool of which only the size of a hand-off is used."""

    def num_bytes(self, num_rows: int) -> int:
        return -(-num_rows // 16) * PAGE_BYTES


def size_with(*overrides: str, num_added_rows: int = 0) -> ArenaSize:
    config = load_config(None, overrides)
    adapter: Callable[..., object] = lambda *_: None  # noqa: E731
    built = BuiltStage(
        engine=cast(Engine, SimpleNamespace(kv=SimpleNamespace(pages=SizedPages()))),
        adapter=cast(AdapterFactory, adapter),
        num_added_rows=num_added_rows,
    )
    return arena_size(config, STAGE, built)


def refusal_of(*overrides: str, num_added_rows: int = 0) -> str:
    with pytest.raises(ConfigError) as refused:
        size_with(*overrides, num_added_rows=num_added_rows)
    assert refused.value.param and refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value.message


def test_stage_without_split_has_the_plain_defaults() -> None:
    assert size_with() == ArenaSize(arena_bytes=64 * MIB, request_cap_bytes=32 * MIB)


def test_split_stage_has_room_for_two_hand_offs_of_the_longest_prompt_by_default() -> None:
    size = size_with(SPLIT)
    assert size.hand_off_bytes == 512 * PAGE_BYTES == 768 * MIB
    arena = Arena(capacity_bytes=size.arena_bytes, request_cap_bytes=size.request_cap_bytes)
    for request in "ab":
        arena.allocate(stored_bytes(size.hand_off_bytes), RequestId(request))
    arena.allocate(32 * MIB)


def test_room_follows_the_limit_of_prompts_and_the_rows_that_a_stage_adds() -> None:
    assert size_with(SPLIT, "limits.max_prompt_tokens=1600").hand_off_bytes == 100 * PAGE_BYTES
    assert (
        size_with(SPLIT, "limits.max_prompt_tokens=1600", num_added_rows=9).hand_off_bytes
        == 101 * PAGE_BYTES
    )
    small = size_with(SPLIT, "limits.max_prompt_tokens=16")
    assert small.request_cap_bytes == 32 * MIB, "other tensors need no less than without a split"


@pytest.mark.parametrize(
    ("name", "override", "others", "held", "enough"),
    [
        ("request_cap_mib", "transfer.request_cap_mib=32", (), 336, 769),
        ("request_cap_mib", "transfer.request_cap_mib=768", (), 8176, 769),
        ("arena_mib", "transfer.arena_mib=64", (), 672, 769),
        ("request_cap_mib", "transfer.request_cap_mib=32", ("transfer.arena_mib=2000",), 336, 769),
    ],
)
def test_limit_of_prompts_that_a_hand_off_cannot_carry_is_refused_with_one_that_it_can(
    name: str, override: str, others: tuple[str, ...], held: int, enough: int
) -> None:
    assert refusal_of(SPLIT, override, *others) == (
        f"transfer.{name}: {override.partition('=')[2]} MiB holds the keys and values of a "
        f"prompt of {held} tokens in thinker, "
        f"and limits.max_prompt_tokens is 8192; set at least {enough} or null, or "
        f"limits.max_prompt_tokens to at most {held}"
    )
    assert size_with(SPLIT, override, *others, f"limits.max_prompt_tokens={held}")
    assert refusal_of(SPLIT, override, *others, f"limits.max_prompt_tokens={held + 1}")
    assert size_with(SPLIT, f"transfer.{name}={enough}", *others)


def test_arena_that_holds_no_prompt_is_refused_with_a_size_only() -> None:
    assert refusal_of(SPLIT, "transfer.arena_mib=1").endswith(
        "limits.max_prompt_tokens is 8192; set at least 769 or null"
    )


def test_limit_of_prompts_beyond_a_value_of_redis_is_refused() -> None:
    config = load_config(None, (SPLIT,))
    with pytest.raises(
        ConfigError,
        match=r"transfer.kind: keys and values of limits.max_prompt_tokens \(8192\) are 768 "
        r"MiB, and",
    ):
        check_inline(config, size_with(SPLIT))
    check_inline(config, size_with(SPLIT, "limits.max_prompt_tokens=5000"))
