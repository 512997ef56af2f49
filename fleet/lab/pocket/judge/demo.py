"""Demonstration: sends three questions to a running fleet, one by voice; saves the answers as WAV
files and as spectrograms in one picture.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import soundfile
from numpy.typing import NDArray

from fleet.core.errors import BadInput
from fleet.lab.pocket.corpus import ChatTurn, Dialogue
from fleet.lab.pocket.judge import ask
from fleet.lab.pocket.judge.ask import ChatQuestion, ChatReply, JudgeClient
from fleet.lab.pocket.judge.questions import speak_all
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, Voice
from fleet.lab.report.plot import saved_figure

PICTURE: Final = "spectrograms.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A question of the demonstration and the turns before it. `name`: name of the audio file.
    `asked_by`: voice of the user, None for typed turns.
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
    """Ask the questions with greedy sampling; write each answer as NAME.wav (24 kHz, 16 bits), and
    one picture, to `out_dir`, created if absent. `report` receives a line for each file.

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


WINDOW_SAMPLES, HOP_SAMPLES = 720, 240
"""Spectrogram windows of 30 ms, long enough to resolve harmonics, every 10 ms."""
TOP_HZ: Final = 8_000
DEPTH_DB: Final = 60.0
"""Dynamic range of the spectrogram: levels further below the loudest are drawn as silence."""
NUM_COLOURS: Final = 20
"""Number of colours, in steps of 3 dB. With more colours or interpolation the file is several times
as large.
"""
MIN_S: Final = 1.0
WIDTH_INCHES, HEIGHT_INCHES, DPI = 9.0, 2.3, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Spectrogram panel of one answer. `samples`: mono at 24 kHz in -1..1."""

    title: str
    samples: NDArray[np.float32]


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write the picture of at least one panel to `path`."""
    from matplotlib import colormaps

    size = (WIDTH_INCHES, HEIGHT_INCHES * len(panels))
    longest_s = max(MIN_S, *(len(panel.samples) / SAMPLE_RATE_HZ for panel in panels))
    with saved_figure(path, len(panels), 1, size, dpi=DPI, sharex=True) as (_, places):
        for panel, place in zip(panels, places, strict=True):
            levels = levels_db(panel.samples)
            length_s = levels.shape[1] * HOP_SAMPLES / SAMPLE_RATE_HZ
            extent = (0, length_s, 0, TOP_HZ / 1000)
            style = {
                "cmap": colormaps["magma"].resampled(NUM_COLOURS),
                "vmin": -DEPTH_DB,
                "vmax": 0,
                "interpolation": "nearest",
            }
            place.imshow(levels, origin="lower", aspect="auto", extent=extent, **style)
            place.set_title(panel.title, fontsize=9)
            place.set(xlim=(0, longest_s), ylabel="kHz")
        places[-1].set_xlabel("s")


def levels_db(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the spectrogram [frequencies up to `TOP_HZ`, hops], lowest frequency first, in dB
    below the loudest level, clipped at `-DEPTH_DB`.

    Silence is `-DEPTH_DB` everywhere.
    """
    padded = np.pad(samples.astype(np.float64), WINDOW_SAMPLES // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW_SAMPLES)[::HOP_SAMPLES]
    power = np.abs(np.fft.rfft(windows * np.hanning(WINDOW_SAMPLES), axis=1)) ** 2
    power = power[:, : 1 + TOP_HZ * WINDOW_SAMPLES // SAMPLE_RATE_HZ]
    floor = max(float(power.max(initial=0)), 1e-12) * 10 ** (-DEPTH_DB / 10)
    loudest = floor * 10 ** (DEPTH_DB / 10)
    return 10 * np.log10(np.maximum(power, floor) / loudest).T
