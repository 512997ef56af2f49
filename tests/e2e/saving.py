"""Clients that save conversations of a divided fleet while a test disturbs the fleet's
processes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet.core.ids import WorkerId
from fleet.lab.client.client import ApiClient
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.requests import make_save_tasks
from fleet.lab.faults.save_report import SaveReport, report_saves
from fleet.lab.faults.saves import SaveLoad, SaveSurroundings
from fleet.lab.faults.schedule import FaultKind
from fleet.lab.faults.session_files import SessionFiles
from tests.e2e.fleets import PATIENCE_S
from tests.e2e.span_fleets import SpanFleet

NUM_CONVERSATIONS = 2


class DisturbedSaves:
    """Clients that save conversations again and again while a test disturbs the fleet's processes.
    `report`: result of the run, None until the block of `running` has ended.
    """

    def __init__(self, fleet: SpanFleet, folder: Path) -> None:
        tasks = make_save_tasks(ApiClient(fleet.up.url).model(), fleet.config, 0, NUM_CONVERSATIONS)
        self._stage, self._folder = fleet.stage, folder
        self._load = SaveLoad(
            tasks,
            SaveSurroundings(
                gateways=Gateways([fleet.up.url]),
                store=SessionFiles(fleet.up.redis_url, fleet.config),
                stages=(fleet.stage,),
                folder=folder,
                exact=True,
            ),
        )
        self._faults: list[InjectedFault] = []
        self.report: SaveReport | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Save conversations during the block, then load them. Fail unless each fault of the test
        struck at least one save.
        """
        self._load.record_reference(lambda: None)
        with self._load.running(time.perf_counter, lambda: None):
            yield
        self.report = report_saves(self._load.finish(), self._faults)

    def strike(self, role: str, disturb: Callable[[WorkerId], None]) -> None:
        """Disturb a process of `role` in the middle of a save, and wait until a later save
        begins.
        """
        while True:
            save = self._load.clock.next_save(self._stage, share=0.3, timeout_s=PATIENCE_S)
            assert save is not None, "no conversation is saved"
            at_s = time.perf_counter()
            if self._load.clock.is_open(save):
                break
        worker = WorkerId(save.workers_of(role)[-1])
        disturb(worker)
        self._faults.append(
            InjectedFault(
                role=role,
                kind=FaultKind.KILL,
                target=worker,
                requests=(),
                at_s=at_s,
                until_s=at_s,
                recovered_s=None,
            )
        )

    def await_next(self) -> None:
        assert (
            self._load.clock.next_save(self._stage, share=0.0, timeout_s=PATIENCE_S) is not None
        ), "no conversation is saved"
