"""Demonstration: three questions to a running fleet, one of them spoken; saves the answers as WAV
files and spectrograms.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import soundfile

from fleet.core.errors import BadInput
from fleet.lab.pocket.corpus import ChatTurn, Dialogue
from fleet.lab.pocket.judge import ask
from fleet.lab.pocket.judge.ask import ChatQuestion, ChatReply, JudgeClient
from fleet.lab.pocket.judge.spectrogram import Panel, draw
from fleet.lab.pocket.judge.teach import speak_all
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, Voice

PICTURE: Final = "spectrograms.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One question and the turns before it. `name`: of its file. `asked_by`: the user's voice; None
    if the turns are typed.
    """

    name: str
    question: str
    voice: str
    before: tuple[ChatTurn, ...] = ()
    asked_by: Voice | None = None


SCENES: Final = (
    Scene(name="typed", question="what is seven plus five", voice="ethan"),
    Scene(name="spoken", question="what colour is the sky", voice="chelsie", asked_by=Voice()),
    Scene(
        name="remembered",
        question="what is my name",
        voice="ethan",
        before=(
            ChatTurn(role="user", text="my name is anna"),
            ChatTurn(role="assistant", text="nice to meet you anna"),
        ),
    ),
)


def demonstrate(
    url: str, out_dir: Path, report: Callable[[str], None], *, api_key: str | None = None
) -> None:
    """Ask with greedy sampling; write each answer as NAME.wav (24 kHz, 16 bits) and one picture to
    `out_dir`, created if absent.

    Raises: BadInput if `out_dir` is a file; ApiError if the fleet cannot be reached or fails;
    ConfigError without espeak-ng.
    """
    client = JudgeClient(url, api_key=api_key)
    if out_dir.exists() and not out_dir.is_dir():
        raise BadInput(f"{out_dir} is a file; pass a folder", param="OUT_DIR")
    out_dir.mkdir(parents=True, exist_ok=True)
    panels: list[Panel] = []
    for scene in SCENES:
        reply = client.ask(_question(scene))
        path = out_dir / f"{scene.name}.wav"
        soundfile.write(path, reply.samples, SAMPLE_RATE_HZ, subtype="PCM_16")
        title = _title(scene, reply)
        report(f"{path}: {title}, {len(reply.samples) / SAMPLE_RATE_HZ:.2f} s")
        panels.append(Panel(title=title, samples=reply.samples))
    draw(panels, out_dir / PICTURE)
    report(f"{out_dir / PICTURE}: the spectrograms")


def _question(scene: Scene) -> ChatQuestion:
    turns = (
        *scene.before,
        ChatTurn(role="user", text=scene.question),
        ChatTurn(role="assistant", text=""),
    )
    dialogue = Dialogue(turns=turns, family=scene.name)
    if scene.asked_by is None:
        return ask.typed(dialogue, scene.voice)
    speeches = speak_all([(turn.text, scene.asked_by) for turn in turns if turn.role == "user"])
    return replace(
        ask.spoken(dialogue, [ask.wav_file(speech.samples, SAMPLE_RATE_HZ) for speech in speeches]),
        voice=scene.voice,
    )


def _title(scene: Scene, reply: ChatReply) -> str:
    how = "typed" if scene.asked_by is None else "spoken"
    return f"“{scene.question}” ({how}); {scene.voice}: “{reply.text}”"
