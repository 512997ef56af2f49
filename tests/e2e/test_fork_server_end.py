"""A killed keeper ends its worker, and the fork server that it started."""

import signal
from pathlib import Path

from fleet.control.connect import connect
from tests.e2e.fleets import process_of
from tests.e2e.test_fork_server import MODULE, ROLES, SETTINGS
from tests.e2e.test_supervision import worker_of
from tests.support import set_options, start_cli, wait_until


def test_worker_and_fork_server_end_with_a_killed_keeper(redis_url: str, tmp_path: Path) -> None:
    options = (*set_options(*SETTINGS), "--keep")
    with (
        connect(redis_url) as control,
        start_cli("worker", ROLES[2], *options, cwd=tmp_path, env={"REDIS_URL": redis_url}) as kept,
    ):
        worker = process_of(worker_of(control, ROLES[2]))
        server = worker.parent()
        assert server is not None and MODULE in server.cmdline()
        kept.stop(signal.SIGKILL)
        wait_until(
            lambda: not worker.is_running() and not server.is_running(), "worker and server to end"
        )
