"""Measurement of speculation: one stage in one process answers questions with each drafter in turn,
round by round.

Before, a draft head is trained on answers to other questions, and the table of served answers is
filled with them. Each numerics has a process of its own.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from fleet.config import FleetConfig
from fleet.config.values import AUTO
from fleet.core.ids import new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.figures.speculation import EAGLE3
from fleet.graphs import Stage
from fleet.lab.measure.deployment import resolve_config
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.options import BenchOptions
from fleet.lab.measure.reference import run_script
from fleet.lab.measure.serving import Steps, local_checkpoint
from fleet.lab.measure.speculation_result import (
    DraftedRuns,
    HeadWork,
    SpeculationResult,
    SpeculationWork,
    TrainedHead,
)
from fleet.lab.pocket.corpus.dialogue import Split
from fleet.lab.pocket.corpus.generate import dialogues
from fleet.processing import ChatRequest, Frontend, Message, TextPart, load_frontend

MODULE, HEAD_MODULE = "fleet.lab.measure.speculation_run", "fleet.lab.measure.speculation_head"
SEED, NUM_LINES = 1, 100
TRAINING = (
    "engine=torch",
    "numerics=fast",
    "training.enabled=true",
    "training.window_samples=8",
    "training.batch_samples=8",
)
"""Settings of the training process, whose stage answers and captures while the head is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """Amounts of work. `num_tokens`: the most of an answer. `train_s`: for the draft head."""

    train_s: float
    num_taught: int
    num_asked: int
    num_tokens: int
    batches: tuple[int, ...]
    num_rounds: int
    numerics: tuple[str, ...]


FULL = SpeculationPlan(
    train_s=16 * 60,
    num_taught=3000,
    num_asked=48,
    num_tokens=48,
    batches=(1, 4, 8, 16),
    num_rounds=6,
    numerics=("fast", "invariant"),
)
SMALL = SpeculationPlan(
    train_s=4,
    num_taught=8,
    num_asked=4,
    num_tokens=12,
    batches=(1, 4),
    num_rounds=1,
    numerics=("fast",),
)


def measure_speculation(options: BenchOptions, steps: Steps) -> SpeculationResult:
    """Measure the stage that verifies drafts of the deployment; the checkpoint may be any that it
    serves.

    Raises: ConfigError; BenchError for a graph without such a stage.
    """
    plan = SMALL if options.small else FULL
    config = resolve_config(options.config, options.overrides)
    graph = config.graph_declaration()
    stage = next((stage for stage in graph.stages if stage.verifies_drafts), None)
    if stage is None:
        raise BenchError(
            f"--speculation needs a stage that verifies drafts, and {config.graph} has none",
            param="--speculation",
        )
    shipped = graph.shipped_folder()
    checkpoint = (
        shipped if config.checkpoint == AUTO and shipped is not None else local_checkpoint(config)
    )
    frontend = load_frontend(graph.frontend, checkpoint, config.limits)
    work = SpeculationWork(
        taught=_requests(config, stage, frontend, plan, "train", plan.num_taught),
        asked=_requests(config, stage, frontend, plan, "held_out", plan.num_asked),
        batches=plan.batches,
        num_rounds=plan.num_rounds,
    )
    loads = list[float | None]()
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as name:
        folder, own = Path(name), (*options.overrides, f"checkpoint={checkpoint}")
        training = (*own, *TRAINING, f"training.folder={folder / 'training'}")
        given = _resolved(options.config, training, folder / "training.yaml")
        head = HeadWork(taught=work.taught, held_out=work.asked, seconds=plan.train_s)
        step = steps("training of a draft head", NUM_LINES)
        trained, load = run_script(
            HEAD_MODULE,
            [*given, "--head", str(folder / "head")],
            msgspec.json.encode(head),
            TrainedHead,
            step,
        )
        loads.append(load)
        runs = list[DraftedRuns]()
        for numerics in plan.numerics:
            step = steps(f"speculation, {numerics}", 1 + sum(map(work.rounds_of, work.batches)))
            drafting = (
                *own,
                f"numerics={numerics}",
                f"stages.{stage.name}.speculation.head={folder / 'head'}",
                f"stages.{stage.name}.speculation.drafter={EAGLE3}",
            )
            given = _resolved(options.config, drafting, folder / f"{numerics}.yaml")
            result, load = run_script(
                MODULE, given, msgspec.json.encode(work), tuple[DraftedRuns, ...], step
            )
            runs += result
            loads.append(load)
    return SpeculationResult(
        model=checkpoint.name, head=trained, runs=tuple(runs), others_cores=tuple(loads)
    )


def _resolved(config_file: Path | None, overrides: Sequence[str], file: Path) -> list[str]:
    """Write the resolved configuration; return the options that name it."""
    config = resolve_config(config_file, overrides)
    file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return ["--config", str(file)]


def _requests(
    config: FleetConfig,
    stage: Stage,
    frontend: Frontend,
    plan: SpeculationPlan,
    split: Split,
    count: int,
) -> tuple[RequestSpec, ...]:
    """Prepare questions of Pocket's corpus, greedily answered; `held_out` ones share none with
    `train`.
    """
    graph = config.graph_declaration()
    text = tuple(edge for edge, kind in graph.media.items() if kind == "text")
    sampling = {stage.name: Sampling(max_tokens=plan.num_tokens)}
    specs: list[RequestSpec] = []
    for dialogue in dialogues(split, count, SEED):
        messages = tuple(
            Message(role=turn.role, content=TextPart(text=turn.text, where="messages"))
            for turn in dialogue.turns[:-1]
        )
        chat = ChatRequest(
            id=new_request_id(),
            graph=graph.name,
            messages=messages,
            outputs=text,
            sampling=sampling,
            spoken=False,
        )
        specs.append(frontend.prepare(chat)[0])
    return tuple(specs)
