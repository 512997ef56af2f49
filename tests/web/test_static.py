"""Vendored scripts equal the released files, and pages load nothing from other hosts."""

import base64
import hashlib
import json

from tests.support import REPO

STATIC = REPO / "web" / "console" / "static"


def test_vendored_files_match_releases() -> None:
    vendor = STATIC / "vendor"
    packages = json.loads((vendor / "hashes.json").read_text())["packages"]
    assert {package["package"]: package["version"] for package in packages} == {
        "htmx.org": "4.0.1",
        "swagger-ui-dist": "5.35.0",
        "uplot": "1.6.32",
    }
    files = {name: entry for package in packages for name, entry in package["files"].items()}
    assert {path.name for path in vendor.iterdir()} - {"hashes.json"} == set(files)
    for name, entry in files.items():
        digest = hashlib.sha512((vendor / name).read_bytes()).digest()
        assert entry["integrity"] == "sha512-" + base64.b64encode(digest).decode(), name


def test_pages_refer_to_no_other_host() -> None:
    files = [
        *STATIC.rglob("*.js"),
        *STATIC.glob("*.css"),
        *(REPO / "web" / "console" / "templates").rglob("*.html"),
    ]
    files = [path for path in files if path.parent.name != "vendor"]
    for path in files:
        text = path.read_text().replace("http://localhost", "")
        assert "http://" not in text and "https://" not in text and "cdn" not in text, path
