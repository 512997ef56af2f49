"""`fleet draft export` and `import`: a round trip keeps every byte; what cannot be read or written
is refused in one line.
"""

import json
from pathlib import Path

import pytest
import torch

from fleet.core.ids import StageName
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.files import WEIGHTS_FILE, save_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.engine.torch.kv_pool import KVShape
from fleet.models.causal_lm.load import read_config
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.stages.draft_heads import new_head_config
from tests.stage_options import stage_options
from tests.support import call_cli, set_options


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    write_head(target, tmp_path / "head")
    return tmp_path / "head"


def write_head(target: Path, folder: Path, **changes: object) -> None:
    config = read_config(target)
    shape = KVShape(num_layers=3, num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
    options = stage_options(StageName("lm"), target)
    given = new_head_config(options, config, shape, config.max_position_embeddings)
    described = given.as_json() | {"draft_vocab_size": 48} | changes
    save_head(
        Eagle3Head(Eagle3Config.from_json(described, "test"), torch.arange(48), seed=3), folder
    )


def run(target: Path, folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = call_cli(
        "draft", *arguments, *set_options("graph=text", f"checkpoint={target}"), cwd=folder
    )
    return done.returncode, done.stdout, done.stderr


def test_round_trip_keeps_every_byte(target: Path, head: Path, tmp_path: Path) -> None:
    assert run(target, tmp_path, "export", "head", "out") == (0, "out\n", "")
    assert run(target, tmp_path, "import", "out", "again") == (0, "again\n", "")
    assert (tmp_path / "again" / WEIGHTS_FILE).read_bytes() == (head / WEIGHTS_FILE).read_bytes()
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["speculators_config"]["verifier"]["name_or_path"] == str(target)


def test_head_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    write_head(target, tmp_path / "other", target_hash="ab" * 32)
    status, _, error = run(target, tmp_path, "export", "other", "out")
    assert (
        status == 1
        and f"belongs to the target {'ab' * 32}" in error
        and not (tmp_path / "out").exists()
    )


def test_folder_that_is_not_empty_is_not_written(target: Path, head: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for command in ("export", "import"):
        status, _, error = run(target, tmp_path, command, "head", "out")
        assert (
            status == 1 and error == "fleet: out: exists and is not an empty folder; name another\n"
        )


def test_format_that_cannot_say_the_layers_is_refused(
    target: Path, head: Path, tmp_path: Path
) -> None:
    status, _, error = run(target, tmp_path, "export", "head", "out", "--format", "sglang")
    assert (
        status == 1
        and error == "fleet: draft head: SGLang cannot tap the rows that enter layer 0\n"
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"draft_vocab_size": None}, "no field draft_vocab_size"),
        ({"tree_width": 4}, "unknown field tree_width"),
    ],
)
def test_missing_or_unknown_field_is_named(
    target: Path, head: Path, tmp_path: Path, change: dict[str, object], cause: str
) -> None:
    run(target, tmp_path, "export", "head", "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    status, _, error = run(target, tmp_path, "import", "out", "again")
    assert status == 1 and cause in error and not (tmp_path / "again").exists()
