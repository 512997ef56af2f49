"""Checkpoints of single stages: where each stage's weights are, and what is refused."""

import json
from pathlib import Path

import pytest

from fleet.cli.checkpoint import find_checkpoints, resolve_checkpoint, resolve_checkpoints
from fleet.config import FleetConfig, load_config
from fleet.config.checkpoints import checkpoint_of
from fleet.core.errors import ConfigError, NoSafeWeights
from fleet.graphs.cascade import ASR, CASCADE, LM, TTS
from fleet.stages.builders import build_options
from tests.support import REPO


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a deployment's checkpoint, with a sub-folder for each stage."""
    root = tmp_path / "root"
    for stage in (ASR, LM):
        write_weights(root / stage)
    (root / TTS).mkdir()
    (root / TTS / "voice.json").write_text(json.dumps({"voice": "v", "voices": ["a"]}))
    return root


def write_weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def config_of(*overrides: str) -> FleetConfig:
    return load_config(None, ("graph=cascade", *overrides))


def test_stage_has_its_own_folder_or_its_place_in_the_deployments(
    root: Path, tmp_path: Path
) -> None:
    own = write_weights(tmp_path / "own")
    config = resolve_checkpoints(
        config_of(f"checkpoint={root}", f"stages.lm.checkpoint={own}", "device=cpu")
    )
    folders = {stage.name: checkpoint_of(config, stage.name, root) for stage in CASCADE.stages}
    assert folders == {ASR: root / ASR, LM: own, TTS: root / TTS}
    assert build_options(config, LM, root).checkpoint == own
    assert resolve_checkpoints(config) == config, "resolved once"


def test_checkpoint_on_the_command_line_replaces_those_of_the_files_stages() -> None:
    """Every mention on the command line counts, in any order; other keys of the stages stay."""
    file = REPO / "configs" / "voice.yaml"
    stages = load_config(file).stages
    assert all(stage.checkpoint for stage in stages.values()) and stages[LM].extra
    config = load_config(file, ("stages.tts.checkpoint=hibari", "checkpoint=tiny"))
    assert {name: stage.checkpoint for name, stage in config.stages.items()} == {
        ASR: None,
        LM: None,
        TTS: "hibari",
    }
    assert config.checkpoint == "tiny" and config.stages[LM].extra == stages[LM].extra
    unnamed = load_config(file, ("stages.asr.checkpoint=/mine",))
    assert unnamed.stages[LM] == stages[LM], "without it the file's are kept"


def test_worker_needs_the_checkpoint_of_its_stage_only(root: Path) -> None:
    config = resolve_checkpoints(config_of(f"checkpoint={root}", "stages.asr.checkpoint=/gone"), LM)
    assert checkpoint_of(config, LM, root) == root / LM
    with pytest.raises(ConfigError, match=r"stages.asr.checkpoint: no folder /gone"):
        resolve_checkpoints(config)


def test_shipped_voice_is_named_without_a_folder(root: Path) -> None:
    config = config_of(f"checkpoint={root}", "stages.tts.checkpoint=hibari")
    folder = resolve_checkpoint(config, TTS)
    assert json.loads((folder / "voice.json").read_text())["voice"] == "hibari"
    with pytest.raises(ConfigError, match=r"stages.lm.checkpoint: no folder .*/hibari"):
        resolve_checkpoint(config_of("stages.lm.checkpoint=hibari"), LM)


def test_folder_without_the_files_of_its_stage_is_refused(root: Path) -> None:
    (root / TTS / "voice.json").unlink()
    (root / ASR / "model.safetensors").unlink()
    config = config_of(f"checkpoint={root}")
    with pytest.raises(ConfigError, match=r"checkpoint: .*/tts has no voice.json"):
        resolve_checkpoint(config, TTS)
    with pytest.raises(NoSafeWeights):
        resolve_checkpoint(config, ASR)


def test_stages_of_other_graphs_share_the_deployments_folder(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "lm")
    config = load_config(None, ("graph=text", f"checkpoint={folder}"))
    assert resolve_checkpoint(config) == resolve_checkpoint(config, LM) == folder
    assert resolve_checkpoints(config).checkpoint == str(folder)
    assert checkpoint_of(config, LM, folder) == folder


def test_doctor_tells_for_each_stage_where_its_weights_come_from(
    root: Path, tmp_path: Path
) -> None:
    given = (f"checkpoint={root}", "stages.tts.checkpoint=hibari")
    with pytest.raises(ConfigError, match="stages.asr.checkpoint: owner/hears@v1 is not in"):
        find_checkpoints(config_of(*given, "stages.asr.checkpoint=owner/hears@v1"))
    found = find_checkpoints(config_of(*given))
    assert list(found) == [f"stages.{stage}.checkpoint" for stage in (ASR, LM, TTS)]
    assert found["stages.lm.checkpoint"] == str(root / LM)
    tiny = find_checkpoints(config_of(f"data_dir={tmp_path}"))
    assert all("a tiny random one is written" in text for text in tiny.values())
