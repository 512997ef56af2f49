"""Measurement of speculation: one stage in one process answers questions with each drafter in turn, round by round.

The table of served answers is filled before with answers to other questions. Each numerics has a process of its own.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from fleet.bench.deployment import resolve_config
from fleet.bench.errors import BenchError
from fleet.bench.options import BenchOptions
from fleet.bench.reference import run_script
from fleet.bench.serving import Steps, local_checkpoint
from fleet.bench.speculation_result import DraftedRuns, SpeculationResult, SpeculationWork
from fleet.config import FleetConfig
from fleet.config.values import AUTO
from fleet.core.ids import new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import Stage
from fleet.pocket.corpus.dialogue import Split
from fleet.pocket.corpus.generate import dialogues
from fleet.processing import ChatRequest, Frontend, Message, TextPart, load_frontend

MODULE = "fleet.bench.speculation_run"
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """Amounts of work. `num_tokens`: the most of an answer."""

    num_taught: int
    num_asked: int
    num_tokens: int
    batches: tuple[int, ...]
    num_rounds: int
    numerics: tuple[str, ...]


FULL = SpeculationPlan(
    num_taught=3000, num_asked=48, num_tokens=48, batches=(1, 4, 8, 16), num_rounds=4, numerics=("fast", "invariant")
)
SMALL = SpeculationPlan(num_taught=8, num_asked=4, num_tokens=12, batches=(1, 4), num_rounds=1, numerics=("fast",))


def measure_speculation(options: BenchOptions, steps: Steps) -> SpeculationResult:
    """Measure the stage that verifies drafts of the deployment; the checkpoint may be any that it serves.

    Raises: ConfigError; BenchError for a graph without such a stage.
    """
    plan = SMALL if options.small else FULL
    config = resolve_config(options.config, options.overrides)
    stage = next((stage for stage in config.graph_declaration().stages if stage.verifies_drafts), None)
    if stage is None:
        raise BenchError(f"--speculation needs a stage that verifies drafts, and {config.graph} has none", param="--speculation")
    shipped = config.graph_declaration().shipped_folder()
    checkpoint = shipped if config.checkpoint == AUTO and shipped is not None else local_checkpoint(config)
    config = config.model_copy(update={"checkpoint": str(checkpoint)})
    frontend = load_frontend(config.graph_declaration().frontend, checkpoint, config.limits)
    work = SpeculationWork(
        taught=_requests(config, stage, frontend, plan, "train", plan.num_taught),
        asked=_requests(config, stage, frontend, plan, "held_out", plan.num_asked),
        batches=plan.batches, num_rounds=plan.num_rounds,
    )  # fmt: skip
    runs, loads = list[DraftedRuns](), list[float | None]()
    for numerics in plan.numerics:
        step = steps(f"speculation, {numerics}", 1 + len(plan.batches) * (plan.num_rounds + 1))
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
            resolved = Path(folder, "resolved.yaml")
            own = config.model_copy(update={"numerics": numerics}).model_dump(mode="json")
            resolved.write_text(yaml.safe_dump(own, sort_keys=False))
            result, load = run_script(
                MODULE, ["--config", str(resolved)], msgspec.json.encode(work), tuple[DraftedRuns, ...], step
            )  # fmt: skip
        runs += result
        loads.append(load)
    return SpeculationResult(model=checkpoint.name, runs=tuple(runs), others_cores=tuple(loads))


def _requests(
    config: FleetConfig, stage: Stage, frontend: Frontend, plan: SpeculationPlan, split: Split, count: int
) -> tuple[RequestSpec, ...]:
    """Prepare questions of Pocket's corpus, greedily answered; `held_out` ones share none with `train`."""
    graph = config.graph_declaration()
    text = tuple(edge for edge, kind in graph.media.items() if kind == "text")
    sampling = {stage.name: Sampling(max_tokens=plan.num_tokens)}
    specs: list[RequestSpec] = []
    for dialogue in dialogues(split, count, SEED):
        messages = tuple(
            Message(role=turn.role, content=TextPart(text=turn.text, where="messages")) for turn in dialogue.turns[:-1]
        )
        chat = ChatRequest(
            id=new_request_id(), graph=graph.name, messages=messages, outputs=text, sampling=sampling, spoken=False
        )  # fmt: skip
        specs.append(frontend.prepare(chat)[0])
    return tuple(specs)
