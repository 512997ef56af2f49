"""A gateway with default limits in a separate process, over a control plane in memory, so that a
test can measure its memory and its event-loop stalls.

`python -m tests.web.gateway_process FOLDER` prints the gateway's URL, and ends when its standard
input ends. A folder without a checkpoint gets a tiny one.
"""

import sys
from pathlib import Path

from fleet.config.schema import FleetConfig
from fleet.process.gc_freeze import freeze_gc
from fleet.processing import load_frontend
from tests.web.checkpoint import write_frontend_files
from tests.web.conftest import Loaded, serving_app
from tests.web.stall_probe import StallProbe
from web.app import create_app


def main(folder: Path) -> None:
    if not (folder / "config.json").exists():
        write_frontend_files(folder)
    config = FleetConfig(web={"model_name": "omni"})  # pyright: ignore[reportArgumentType]
    frontend = load_frontend(config.graph_declaration().frontend, folder, config.limits)
    client = Loaded(checkpoint=folder, config=config, frontend=frontend).fake_client()
    app = create_app(config, client, frontend, api_key=None)
    app.router.routes.append(StallProbe(client.reset).route())
    freeze_gc()
    with serving_app(app, config) as gateway:
        print(gateway.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
