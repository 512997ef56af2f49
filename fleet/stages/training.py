"""The `trainer` stage of every graph: its adapter, and the engine that trains a draft head for the
graph's main stage.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from fleet.core.ids import EdgeName, Walk
from fleet.core.request import RequestSpec, Sampling
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.eagle3.vocabulary import choose_vocabulary
from fleet.drafts.trainer.engine import ANSWER_START, VERSION, WINDOWS, TrainerEngine
from fleet.drafts.trainer.folder import VERSIONS
from fleet.drafts.trainer.replay import ReplayBuffer
from fleet.drafts.trainer.samples import TargetParts
from fleet.drafts.trainer.schedule import TrainingSchedule
from fleet.drafts.trainer.trainer import Trainer, TrainerSettings
from fleet.engine.base import Arrays, EngineInput, EngineOutput, EngineRequest
from fleet.graphs.training import PUBLISH, TRAIN, TRAINED
from fleet.stages.base import (
    NO_OUTPUT,
    BuiltStage,
    EdgeItem,
    LoggedOutput,
    TaskAdapter,
)
from fleet.stages.draft_heads import StoredHeads
from fleet.stages.options import BuildOptions


def build_trainer(
    options: BuildOptions,
    config: Eagle3Config,
    target: TargetParts,
    end_ids: Collection[int],
    *,
    head_VH: Tensor | None = None,
    norm_H: Tensor | None = None,
) -> BuiltStage:
    """Build the `trainer` stage around a newly initialised head; once running, the trainer
    continues from the fleet's last checkpoint if there is one.

    `config`: configuration of the head. `target`: parts of the main stage's model. `end_ids`: end
    tokens, which the draft vocabulary always has. `head_VH`, `norm_H`: output head and final norm
    of the main stage's model, from which the head is initialised.
    """
    given, folder = options.config.training, options.config.drafts_dir
    vocabulary = choose_vocabulary([], sorted(end_ids), config.draft_vocab_size, config.vocab_size)
    head = Eagle3Head(
        config,
        vocabulary,
        seed=1,
        device=torch.device(options.device),
        target_head_VH=head_VH,
        target_norm_H=norm_H,
    )
    settings = TrainerSettings(
        window_samples=given.window_samples,
        batch_samples=given.batch_samples,
        num_steps=given.num_steps,
        learning_rate=given.learning_rate,
    )
    buffer = ReplayBuffer(max_samples=given.replay_samples, max_bytes=given.replay_mib << 20)
    schedule = TrainingSchedule(
        num_slots=options.own.max_batch,
        window_samples=given.window_samples,
        passes=given.passes,
        checkpoint_windows=given.checkpoint_windows,
        held_out=given.held_out,
        margin=given.margin if given.promote == "auto" else None,
    )
    engine = TrainerEngine(Trainer(head, target, settings, buffer), schedule, folder)
    stored = StoredHeads(folder / VERSIONS, config)
    return BuiltStage(
        engine=engine,
        adapter=lambda spec, _blob: TrainerAdapter(spec),
        begin_training=engine.begin,
        heads=stored,
    )


class TrainerAdapter(TaskAdapter):
    """Adapter of a hidden-state sample in the trainer: takes hidden states, and sends the
    acknowledgement.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self._spec = spec

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        params = {
            ANSWER_START: str(len(self._spec.prompt_ids)),
            PUBLISH: self._spec.params.get(PUBLISH, ""),
        }
        return EngineRequest(request_id=self._spec.id, sampling=Sampling(), params=params), ()

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        return [EngineInput(walk=TRAIN, arrays=arrays, final=final)]

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None:
            return ()
        arrays: dict[str, np.ndarray] = {name: output.arrays[name] for name in (WINDOWS, VERSION)}
        return [EdgeItem(edge=TRAINED, walk=TRAIN, arrays=arrays, final=output.final)]
