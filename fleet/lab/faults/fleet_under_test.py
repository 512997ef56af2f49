"""A fleet started by `fleet chaos`: the processes of `fleet up`, and the additional processes and
clients that faults need. Knows no schedule.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from fleet.config import FleetConfig
from fleet.config.settings import read_settings
from fleet.control.embedded import embedded_url
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.event_log import EventLog
from fleet.lab.faults.faults import FaultInjector, gateway_command
from fleet.lab.faults.processes import ExtraProcesses
from fleet.lab.faults.redis_faults import RedisFaults
from fleet.lab.faults.save_clock import SaveClock
from fleet.lab.faults.schedule import CONDUCTOR
from fleet.lab.faults.watch import FleetWatch, Residue
from fleet.lab.measure.deployment import RESOLVED_NAME, TargetFleet
from fleet.lab.report.progress import Meter
from fleet.process.free_ports import free_port

EXTRAS_LOG = "chaos.log"
SETTLE_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUnderTest:
    """A running fleet with all its roles. `urls`: addresses of its gateways. `saves`: clock of the
    conversation saves into which faults may be injected.
    """

    config: FleetConfig
    model: str
    redis_url: str
    urls: list[str]
    api_key: str | None
    gateways: Gateways
    watch: FleetWatch
    injector: FaultInjector
    saves: SaveClock

    def settle(self, timeout_s: float) -> Residue:
        """Wait for the state of ended requests to disappear, for at most `timeout_s`; return what
        is left.
        """
        pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
        while not (residue := self.watch.residue()).is_empty and time.monotonic() < deadline_s:
            pause.wait(SETTLE_POLL_S)
        return residue


@contextmanager
def fleet_under_test(
    target: TargetFleet,
    progress: Meter,
    *,
    second_gateway: bool,
    redis_faults: RedisFaults | None = None,
    silence_s: float | None = None,
) -> Iterator[FleetUnderTest]:
    """Start a second conductor, and with `second_gateway` a second gateway at which clients resume;
    yield the fleet once it is complete. `redis_faults`: faults of the run's own Redis. `silence_s`:
    read time-out of a client's connection. Raises: ChaosError.
    """
    config, api_key = target.config, read_settings().api_key
    own_url = redis_faults.servers.url if redis_faults else None
    redis_url = own_url or embedded_url(config.redis_data_dir)
    extras = ExtraProcesses(config.data_dir / RESOLVED_NAME, config.data_dir / EXTRAS_LOG, own_url)
    urls = [target.url]
    with ExitStack() as stack:
        stack.callback(extras.stop)
        extras.start([CONDUCTOR])
        if second_gateway:
            port = free_port()
            extras.start(gateway_command(port), redis_faults.relayed_url if redis_faults else None)
            urls.append(f"http://127.0.0.1:{port}")
        watch = stack.enter_context(closing(FleetWatch(config, len(urls), redis_url)))
        event_log = stack.enter_context(closing(EventLog(redis_url)))
        saves = SaveClock()
        injector = FaultInjector(watch, event_log, extras, redis_faults, saves)
        progress.steps("waiting until the fleet is complete", None)
        if not injector.wait_until_complete():
            raise ChaosError("the fleet did not become complete, although no fault was injected")
        yield FleetUnderTest(
            config=config,
            model=target.api.model(),
            redis_url=redis_url,
            urls=urls,
            api_key=api_key,
            gateways=Gateways(urls, api_key, silence_s),
            watch=watch,
            injector=injector,
            saves=saves,
        )
