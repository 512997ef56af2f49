"""Small random checkpoints of the graph `cascade`, one folder per stage, for tests and for trying
Fleet. The recogniser hears noise, and the language model answers noise; the voice is a real one.
"""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

from fleet.graphs.cascade import ASR, CASCADE, LM, TTS
from fleet.models.causal_lm.tiny import write_tiny_checkpoint as write_tiny_lm

RECOGNISER = "fleet.models.whisper.tiny:write_tiny_whisper"
VOICE = "hibari"


def write_tiny_checkpoint(out_dir: Path, seed: int = 0) -> Path:
    """Write the folders into `out_dir` (created if absent) and return it; equal seeds give equal
    bytes.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    module, _, name = RECOGNISER.partition(":")
    write_recogniser: Callable[[Path, int], object] = getattr(importlib.import_module(module), name)
    write_recogniser(out_dir / ASR, seed)
    write_tiny_lm(out_dir / LM, seed)
    shipped = CASCADE.stage(TTS).shipped_folder(VOICE)
    assert shipped is not None, f"the voice {VOICE} is shipped"
    shutil.copytree(shipped, out_dir / TTS)
    return out_dir
