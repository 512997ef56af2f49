"""A gateway with default limits in a separate process, over a control plane in memory, so that its memory can be measured.

`python -m tests.web.gateway_process FOLDER` prints its URL and ends with its standard input. The folder gets a tiny checkpoint.
"""

import sys
from dataclasses import replace
from pathlib import Path

from fleet.config.schema import FleetConfig, Limits
from fleet.processing import load_frontend
from tests.web.conftest import load, serving


def main(folder: Path) -> None:
    loaded = load(folder)
    config = FleetConfig.model_validate({**loaded.config.model_dump(), "limits": Limits()})
    frontend = load_frontend(config.graph_declaration().frontend, loaded.checkpoint, config.limits)
    with serving(replace(loaded, config=config, frontend=frontend)) as gateway:
        print(gateway.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
