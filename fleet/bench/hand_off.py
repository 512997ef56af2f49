"""Split prefill and decode: how long an answer rests between two workers, and on what. Knows stages only as declared.

Real processes, one request at a time, so that nothing waits but for the hand-off itself. The moments are those of the requests'
own stories, as the workers told them.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fleet.bench.chat import ChatApi
from fleet.bench.deployment import own_fleet, resolve_config
from fleet.bench.errors import BenchError
from fleet.bench.options import BenchOptions
from fleet.bench.prompts import PROMPTS
from fleet.bench.split import body_of, split, split_stages, with_checkpoint
from fleet.config.settings import read_settings
from fleet.core.hand_off import HandOff
from fleet.core.ids import StageName
from fleet.reporting.background_load import BackgroundLoad
from fleet.reporting.stats import Summary, percentile, summarise

PARTS = (
    ("copied or lent, and given up", "prefilled_us", "handed_us"),
    ("picked up by the new owner", "handed_us", "claimed_us"),
    ("its logs read", "claimed_us", "opened_us"),
    ("blocks pulled", "opened_us", "pulled_us"),
    ("input fed, confirmed, adopted", "pulled_us", "confirmed_us"),
    ("first step begins", "confirmed_us", "resumed_us"),
)
"""(what happens, from this moment, to that one)"""
MAX_TOKENS, FRAMES = 8, 8
"""Short answers: only their beginning is measured."""
WARM_UP = 3
PAUSE_S = 0.02
"""After an answer's end, for its processes to have done with it."""

Steps = Callable[[str, int], Callable[[], None]]


class StageHandOffs(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-offs of one stage. `first`: that of the first request ever, when its workers had not met."""

    stage: StageName
    hand_offs: tuple[HandOff, ...]
    first: HandOff | None

    @property
    def whole_ms(self) -> Summary | None:
        """From the end of the source's last step to the beginning of the new owner's first."""
        return summarise([_ms(one, "prefilled_us", "resumed_us") for one in self.hand_offs])

    @property
    def first_ms(self) -> float | None:
        return _ms(self.first, "prefilled_us", "resumed_us") if self.first else None

    @property
    def parts_ms(self) -> dict[str, Summary | None]:
        return {name: summarise([_ms(one, begin, end) for one in self.hand_offs]) for name, begin, end in PARTS}

    @property
    def num_recomputed(self) -> int:
        """Whose blocks did not come, or too late."""
        return sum(one.confirmed_us is None for one in self.hand_offs)


class PageReads(msgspec.Struct, frozen=True, kw_only=True):
    """Units: microseconds of the same bytes, turn by turn: in blocks, from finding pages to all in place; in one piece, the read
    alone; and copied out of the pool, into the arena, read, checked, and written into the pool.
    """

    num_bytes: int
    num_blocks: int
    blocks_us: tuple[float, ...]
    plain_us: tuple[float, ...]
    copied_us: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Speed of the blocks, of the plain read's."""
        return percentile(self.plain_us, 50) / percentile(self.blocks_us, 50)

    @property
    def blocks(self) -> Summary | None:
        return summarise(self.blocks_us)

    @property
    def plain(self) -> Summary | None:
        return summarise(self.plain_us)

    @property
    def copied(self) -> Summary | None:
        return summarise(self.copied_us)


class HandOffResult(msgspec.Struct, frozen=True, kw_only=True):
    """`others_cores`: what processes that are not ours kept busy meanwhile. `pages`: None where it was not measured."""

    stages: tuple[StageHandOffs, ...]
    others_cores: float
    pages: PageReads | None = None


def measure_hand_offs(options: BenchOptions, steps: Steps) -> HandOffResult:
    """As many requests as hand-offs are asked for, by a fleet started for it; each split stage hands each of them off once.

    Raises: BenchError if a request fails, or its story tells of no hand-off.
    """
    plain = resolve_config(options.config, options.overrides)
    overrides = (*with_checkpoint(plain, options.overrides), *split(plain))
    started = steps("starting a split fleet", 1)
    with own_fleet(options.config, overrides) as target:
        started()
        api = ChatApi(target.url, read_settings().api_key)
        media = tuple(target.config.graph_declaration().media.values())
        bounds = {"max_tokens": MAX_TOKENS, "frames": FRAMES}
        bodies = [body_of(api.model(), prompt, target.config, **bounds, media=media) for prompt in PROMPTS]
        stages = split_stages(target.config)
        warm_up = _stories(api, bodies, WARM_UP, stages, steps("hand-offs, warm-up", WARM_UP))
        neighbours = BackgroundLoad()
        told = _stories(api, bodies, options.hand_offs, stages, steps("hand-offs", options.hand_offs))
        others_cores = neighbours.cores()
    return HandOffResult(
        stages=tuple(
            StageHandOffs(stage=stage, hand_offs=tuple(story[stage] for story in told), first=warm_up[0][stage])
            for stage in stages
        ),
        others_cores=others_cores,
    )


def _stories(
    api: ChatApi, bodies: Sequence[bytes], count: int, stages: Sequence[StageName], advance: Callable[[], None]
) -> list[Mapping[StageName, HandOff]]:
    """Ask one after another, and read each one's story after its end."""
    stories: list[Mapping[StageName, HandOff]] = []
    for index in range(count):
        recording = api.answer(index, bodies[index % len(bodies)], time.perf_counter(), lambda: False)
        told = api.hand_offs(recording.request)
        missing = [stage for stage in stages if stage not in told]
        if missing:
            raise BenchError(f"the story of {recording.request} tells of no hand-off of {', '.join(missing)}")
        stories.append(told)
        advance()
        time.sleep(PAUSE_S)
    return stories


def _ms(told: HandOff, begin: str, end: str) -> float | None:
    """None where one of the moments never was."""
    began_us, ended_us = getattr(told, begin), getattr(told, end)
    return None if began_us is None or ended_us is None else (ended_us - began_us) / 1000
