"""Training recipe of Pocket, from the corpus to a checkpoint folder: a list of steps, each
resumable and runnable alone.

A finished step is quick to run again: existing data is reused, and a finished training stops
immediately. `STEPS` has the dependencies. The language stages, the codec and the audio tower share
only the model's configuration, so their order is free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from fleet.core.errors import BadInput
from fleet.lab.pocket import shape
from fleet.lab.pocket.train.loop import Schedule, TrainablePart, train

DEFAULT_FOLDER: Final = Path(".fleet/pocket")
SPEECH_SHARDS, RECORDING_SHARDS = 40, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Options of a recipe run. `folder`: folder of data and trained parts. `device`: torch device
    of the trainings, such as cuda. `threads`: torch threads. `workers`: processes that build data.

    `share`: factor on the number of steps of each training; a value below 1 tests the recipe, with
    worse results. `start`: exported folder from whose weights the trainings start, None for random
    weights; it must have the same shape and, for codec and Talker, the same codebook.
    """

    folder: Path = DEFAULT_FOLDER
    start: Path | None = None
    device: str = "cpu"
    threads: int = 1
    workers: int = 1
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("threads", "workers", "share"):
            if getattr(self, name) <= 0:
                raise BadInput(f"{name}: must be positive, not {getattr(self, name)}", param=name)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            cause = str(error).splitlines()[0]
            raise BadInput(
                f"device: {self.device!r} is not available ({cause}); use cpu", param="device"
            ) from error

    @property
    def speech(self) -> Path:
        return self.folder / "speech"

    @property
    def recordings(self) -> Path:
        return self.folder / "recordings"

    @property
    def parts(self) -> Path:
        return self.folder / "parts"

    def weights(self, part: str) -> Path:
        return self.parts / f"{part}.safetensors"

    def scaled(self, schedule: Schedule) -> Schedule:
        return schedule.scaled(self.share)

    def keep_start(self, name: str, *parts: str) -> None:
        """Write the weights that `parts` have in the folder `start` as the result of the training
        `name`. Does nothing without `start`, or if the training already has a result.
        """
        from safetensors.torch import save_file

        from fleet.lab.pocket.export import part_of

        if self.start is not None and not self.weights(name).exists():
            self.parts.mkdir(parents=True, exist_ok=True)
            weights = [part_of(self.start, part) for part in parts]
            save_file({key: each[key] for each in weights for key in each}, self.weights(name))

    def train(self, part: TrainablePart, schedule: Schedule) -> None:
        from fleet.lab.pocket.export import PLACES, part_of

        start = part_of(self.start, part.name) if self.start and part.name in PLACES else None
        train(
            part,
            self.parts,
            schedule.warm() if start else schedule,
            seed=shape.SEED,
            start=start,
            device=self.device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the recipe. `after`: steps whose results this step reads."""

    description: str
    run: Callable[[RecipeOptions], None]
    after: tuple[str, ...] = ()


def _speech(work: RecipeOptions) -> None:
    from fleet.lab.pocket.speech import shards

    shards.build(work.speech, "held_out", 2, workers=work.workers)
    shards.build(work.speech, "train", SPEECH_SHARDS, workers=work.workers)
    book = shards.fit_codebook(work.speech, shards.FIT_SHARDS)
    for split in ("held_out", "train"):
        shards.encode_missing(work.speech, split, book)


def _recordings(work: RecipeOptions) -> None:
    from fleet.lab.pocket.hearing import recordings

    recordings.build(work.recordings, "held_out", 1, work.workers)
    recordings.build(work.recordings, "unseen", 1, work.workers)
    recordings.build(work.recordings, "train", RECORDING_SHARDS, work.workers)


def _thinker(work: RecipeOptions) -> None:
    from fleet.lab.pocket.train import thinker

    work.train(thinker.ThinkerPart(shape.SEED), work.scaled(thinker.SCHEDULE))


def _codec(work: RecipeOptions) -> None:
    from fleet.lab.pocket.speech.codes import Codebook
    from fleet.lab.pocket.speech.shards import CODEBOOK
    from fleet.lab.pocket.train import codec

    book = Codebook.load(work.speech / CODEBOOK)
    work.train(
        codec.Codec(book, *codec.load_examples(work.speech, book), seed=shape.SEED),
        work.scaled(codec.SCHEDULE),
    )


def _talker(work: RecipeOptions) -> None:
    from fleet.lab.pocket.train import talker

    schedule = work.scaled(talker.SCHEDULE)
    work.train(talker.TalkerPart(work.speech, steps=schedule.steps), schedule)


def _hearing(work: RecipeOptions) -> None:
    from fleet.lab.pocket.train import hearing

    work.train(hearing.HearingPart(work.recordings, shape.SEED), work.scaled(hearing.SCHEDULE))


def _joint(work: RecipeOptions) -> None:
    """Train Thinker and audio tower together. For a part without a training result in `folder`, the
    weights of `start` are used.
    """
    from fleet.lab.pocket.train import joint

    for part in ("thinker", "hearing"):
        work.keep_start(part, part)
    work.train(
        joint.JointPart(work.recordings, work.parts, shape.SEED), work.scaled(joint.SCHEDULE)
    )


def _telephone(work: RecipeOptions) -> None:
    """Train the audio tower on telephone sound. Without a result of the joint training in `folder`,
    the tower of `start` is trained.
    """
    from fleet.lab.pocket.train import telephone

    work.keep_start("joint", "thinker", "hearing")
    work.train(
        telephone.TelephonePart(work.recordings, work.parts, shape.SEED),
        work.scaled(telephone.SCHEDULE),
    )


def _export(work: RecipeOptions) -> None:
    """Export all parts to a checkpoint folder. For a part without a training result in `folder`,
    the weights of `start` are used; but a result of `joint` requires a result of `telephone`, which
    is trained after it.
    """
    from fleet.lab.pocket.export import export

    if not work.weights("joint").exists():
        work.keep_start("joint", "thinker", "hearing")
        work.keep_start("telephone", "hearing")
    for part in ("talker", "codec"):
        work.keep_start(part, part)
    files = {"thinker": "joint", "hearing": "telephone", "talker": "talker", "codec": "codec"}
    export({part: work.weights(name) for part, name in files.items()}, work.folder / "pocket")


STEPS: Final[Mapping[str, Step]] = {
    "speech": Step(description="synthesizes the corpus and encodes it", run=_speech),
    "recordings": Step(description="synthesizes the questions in many voices", run=_recordings),
    "thinker": Step(description="trains the answers to typed questions", run=_thinker),
    "codec": Step(description="trains codes to audio", run=_codec, after=("speech",)),
    "talker": Step(description="trains text to codes", run=_talker, after=("speech",)),
    "hearing": Step(description="trains audio to letters", run=_hearing, after=("recordings",)),
    "joint": Step(
        description="trains the answers to spoken questions",
        run=_joint,
        after=("recordings", "thinker", "hearing"),
    ),
    "telephone": Step(
        description="trains the hearing of telephone sound",
        run=_telephone,
        after=("recordings", "joint"),
    ),
    "export": Step(
        description="writes the folder of the checkpoint",
        run=_export,
        after=("codec", "talker", "joint", "telephone"),
    ),
}


def run_steps(work: RecipeOptions, names: Sequence[str] = ()) -> None:
    """Run the steps `names`, or all steps if empty, in the order of the recipe. Steps that a named
    step depends on are not run.

    Raises: BadInput for an unknown step; ConfigError if the result of an earlier step is missing.
    """
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        raise BadInput(
            f"step: {unknown[0]!r} is unknown; use some of {', '.join(STEPS)}", param="step"
        )
    torch.set_num_threads(work.threads)
    for name, step in STEPS.items():
        if not names or name in names:
            print(f"fleet pocket: {name}: {step.description}", flush=True)
            step.run(work)
