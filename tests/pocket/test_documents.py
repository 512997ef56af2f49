"""Files shipped beside Pocket's weights: the model card's links are valid, audio files are small,
and the wheel has all of them.
"""

import re
import tomllib

import pytest

from fleet.lab.pocket.judge.demo import PICTURE, SCENES
from tests.support import REPO

POCKET = REPO / "fleet" / "lab" / "pocket"
CHECKPOINT, DOCS = REPO / "fleet" / "checkpoints" / "pocket", POCKET / "docs"
LINK = re.compile(r"\]\(([^)#]+)\)")
MAX_WAV_BYTES, MAX_PNG_BYTES, MAX_CHECKPOINT_BYTES = 200_000, 300_000, 60_000_000
LIMITS = {PICTURE: MAX_PNG_BYTES} | {f"{scene.name}.wav": MAX_WAV_BYTES for scene in SCENES}


def test_model_card_links_existing_files() -> None:
    targets = [
        target
        for target in LINK.findall((CHECKPOINT / "README.md").read_text())
        if "//" not in target
    ]
    assert f"../../lab/pocket/docs/{PICTURE}" in targets
    assert {f"../../lab/pocket/docs/{scene.name}.wav" for scene in SCENES} <= set(targets)
    assert [target for target in targets if not (CHECKPOINT / target).is_file()] == []


@pytest.mark.parametrize("name", LIMITS)
def test_document_is_small(name: str) -> None:
    assert 1_000 < (DOCS / name).stat().st_size < LIMITS[name]


def test_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < MAX_CHECKPOINT_BYTES


def test_shipped_files_are_package_data() -> None:
    patterns = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["*"]
    packages = (POCKET, REPO / "fleet")
    shipped = {path for each in packages for pattern in patterns for path in each.glob(pattern)}
    wanted = {path for folder in (CHECKPOINT, DOCS) for path in folder.rglob("*") if path.is_file()}
    assert wanted and wanted <= shipped
