"""Thinkers and Talkers whose layers are divided among span workers, and their answers, for
comparison with undivided stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec
from fleet.engine.base import await_ready
from fleet.engine.torch.lm_engine import LMEngine
from fleet.graphs.qwen3_omni import CODE2WAV, QWEN3_OMNI, TALKER, THINKER
from fleet.lab.measure.twin import Answers, SlowTwin
from tests.oracle.cases import AUDIO, CASES, CODES, TEXT, Case
from tests.oracle.twins import Built, ask, codes_of, speaking_stages, tokens_of
from tests.span_route import SpanRoute, Split

INVARIANT: dict[str, Any] = {"numerics": "invariant", "prefill_chunk_tokens": 16}
SHORT = tuple(
    replace(case, tokens=8, frames=12)
    for case in CASES
    if case.name in ("text", "audio", "three turns", "one token")
)
TEMPERATURES = (0.0, 0.9)
THINKERS = {
    "forward 1": Split(anchor="0:1", workers=("2:output",), returned="logits"),
    "forward 1 tapped on the anchor": Split(anchor="0:2", workers=("3:output",), returned="logits"),
    "forward 2": Split(anchor="0:0", workers=("1:2", "3:output"), returned="logits"),
    "head on anchor 2": Split(anchor="0:0", workers=("1:1", "2:last"), returned="last_rows"),
    "reverse 1": Split(anchor="3:output", workers=("0:2",), returned="rows"),
    "reverse 2": Split(anchor="2:output", workers=("0:0", "1:1"), returned="rows"),
    "reverse 2 tapped before the anchor": Split(
        anchor="3:output", workers=("0:1", "2:2"), returned="rows"
    ),
}
"""Divisions of the tiny Thinker, which has 4 layers, of which layer 2 is tapped."""
TALKERS = {
    "forward 1": Split(anchor="0:0", workers=("1:last",), returned="last_rows"),
    "forward 2": Split(anchor="0:0", workers=("1:1", "2:last"), returned="last_rows"),
    "reverse 1": Split(anchor="2:output", workers=("0:1",), returned="rows"),
    "reverse 2": Split(anchor="2:output", workers=("0:0", "1:1"), returned="rows"),
}
"""Divisions of the tiny Talker, which has 3 layers."""
Spoken = dict[str, tuple[list[int], list[list[int]], bytes]]
"""Answers by request name: tokens, codes and audio samples (PCM16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenRequests:
    """Requests by name: the case and its temperature. `blobs`: audio prompts by request id."""

    specs: dict[str, RequestSpec]
    blobs: dict[RequestId, bytes]


class DividedTwin(SlowTwin):
    """The slow twin of the graph, with divided stages; dead span workers are replaced before each
    turn.
    """

    def __init__(self, built: Built, routes: Sequence[SpanRoute] = ()) -> None:
        super().__init__(QWEN3_OMNI, built)
        self.routes = routes
        self.most_running = 0

    def before_turn(self) -> None:
        for route in self.routes:
            self.most_running = max(self.most_running, route.engine.stats().running)
            if route.engine.remote is not None:
                route.engine.remote.take_suspects()
            route.repair()


@dataclass(slots=True)
class SpeechStages:
    """The three stages of the speaking graph. `routes`: span routes of the divided stages.
    `most_running`: largest number of concurrent requests in a divided stage during the last
    `speak`.
    """

    built: Built
    routes: dict[StageName, SpanRoute] = field(default_factory=dict[StageName, SpanRoute])
    most_running: int = 0

    def twin(self) -> DividedTwin:
        return DividedTwin(self.built, list(self.routes.values()))

    def speak(self, asked: SpokenRequests, aborted: Mapping[str, int] | None = None) -> Spoken:
        """Run the requests through the stages, and return the answers of the requests that were not
        aborted.

        `aborted`: maps a request's name to the number of the chunk (counted over all requests) at
        which the request is aborted.
        """
        twin, ending = self.twin(), aborted or {}
        answers: Answers = {
            spec.id: {TEXT: [], CODES: [], AUDIO: []} for spec in asked.specs.values()
        }
        for number, chunk in enumerate(twin.stream(list(asked.specs.values()), asked.blobs)):
            if chunk.arrays:
                answers[chunk.request].setdefault(chunk.edge, []).append(chunk.arrays)
            for name in [name for name, at in ending.items() if at == number]:
                twin.abort(asked.specs[name].id)
        self.most_running = twin.most_running
        assert not twin.errors
        return {
            name: spoken_of(answers, spec.id)
            for name, spec in asked.specs.items()
            if name not in ending
        }


def requests(checkpoint: Path, cases: Sequence[Case] = SHORT) -> SpokenRequests:
    """Return greedy and sampled requests, by default a few with and without audio."""
    asked = {
        temperature: ask(checkpoint, cases, temperature=temperature) for temperature in TEMPERATURES
    }
    return SpokenRequests(
        specs={
            f"{case.name} at {temperature}": spec
            for temperature, each in asked.items()
            for case, spec in zip(each.cases, each.specs, strict=True)
        },
        blobs={request: blob for each in asked.values() for request, blob in each.blobs.items()},
    )


def spoken_of(answers: Answers, request: RequestId) -> tuple[list[int], list[list[int]], bytes]:
    samples = [arrays["pcm"] for arrays in answers[request][AUDIO]]
    pcm = np.concatenate(samples).tobytes() if samples else b""
    return tokens_of(answers, request), codes_of(answers, request).tolist(), pcm


def whole_speech(checkpoint: Path, **options: Any) -> SpeechStages:
    """Build undivided stages with invariant numerics. `options`: further `BuildOptions` fields."""
    return SpeechStages(
        speaking_stages(checkpoint, stages=(THINKER, TALKER, CODE2WAV), **INVARIANT, **options)
    )


@contextmanager
def divided_speech(
    checkpoint: Path,
    splits: dict[StageName, Split],
    whole: SpeechStages,
    *,
    options: Mapping[str, Any] = INVARIANT,
    **anchor: Any,
) -> Iterator[SpeechStages]:
    """Divide the stages in `splits` among span workers, and share the other stages with `whole`.

    `options`: `BuildOptions` fields of the divided stages. `anchor`: `AnchorOptions` fields.
    """
    with ExitStack() as opened:
        stages = SpeechStages(dict(whole.built))
        for stage, split in splits.items():
            stages.routes[stage] = SpanRoute(
                checkpoint, split, options=dict(options), anchor=anchor, stage=stage
            )
            opened.callback(stages.routes[stage].close)
            stages.built[stage] = stages.routes[stage].built
        yield stages


def assert_all_free(stages: SpeechStages) -> None:
    """Check that no process holds state of an ended request, once the anchors have reported its
    end.
    """
    twin = stages.twin()
    for route in stages.routes.values():
        assert isinstance(route.engine, LMEngine)
        route.engine.pool.check()
        assert route.engine.stats().kv.pages_used == 0
        while not all(worker.is_idle for worker in route.worker_at):
            twin.before_turn()
            await_ready(route.engine, 0.01)
