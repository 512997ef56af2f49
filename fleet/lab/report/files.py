"""Report files: their folders are checked before a measurement begins, and the files written after
it.
"""

from pathlib import Path
from typing import Any

import msgspec

from fleet.core.errors import BadInput


def check_report_folders(**paths: Path | None) -> None:
    """Check that each report file's folder exists. `paths`: report file by option name, None if not
    requested. Raises: BadInput naming the option.
    """
    for option, path in paths.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(
                f"--{option} {path}: there is no folder {path.absolute().parent}; create it",
                param=f"--{option}",
            )


def write_json(report: msgspec.Struct | dict[str, Any], path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
