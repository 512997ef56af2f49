"""`fleet --help` and the processes that serve import nothing of the packages that measure, test and train."""

import subprocess
import sys

from tests.support import REPO, cli_env

NOT_SERVING = ("fleet.bench", "fleet.chaos", "fleet.pocket")
PROGRAM = f"""
import importlib, pathlib, sys
from typer.testing import CliRunner
from fleet.cli.checkpoint import resolve_checkpoint
from fleet.cli.main import app
from fleet.config import FleetConfig
from fleet.graphs import GRAPHS

assert CliRunner().invoke(app, ["--help"]).exit_code == 0
resolve_checkpoint(FleetConfig())
served = ["fleet.conductor.driver", "fleet.worker.main", "fleet.cli.manager", "web.serve"]
for graph in GRAPHS.values():
    served += [graph.frontend.partition(":")[0], *(stage.builder.partition(":")[0] for stage in graph.stages)]
for name in served:
    importlib.import_module(name)
print(*sorted(name for name in sys.modules if name.startswith({NOT_SERVING!r})))
"""


def test_serving_path_imports_no_package_that_measures_or_trains() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=cli_env(), cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stdout + done.stderr
