"""A worker's vitals are written with the renewals of its lease: all once per lease, otherwise only
the changed ones.
"""

from typing import cast

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.config.schema import RENEWALS
from fleet.control import keys, scripts
from fleet.control.connect import Reply, run, text
from fleet.worker.process import lease as leases
from fleet.worker.process.lease import Lease
from tests.control_plane import WORKER


class VitalsBench:
    """A registered worker whose lease the test renews. `written`: vitals written by each
    renewal.
    """

    def __init__(self, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        run(client, scripts.register(WORKER, "lm", 60_000_000, {"kind": "test"}))
        self.client, self.breaks = client, False
        self.vitals: dict[str, int | str] = {"running": 1, "pages_used": 7}
        self.written: list[dict[str, str]] = []
        self._lease = Lease(client, WORKER, 60.0, lambda: self.vitals)
        monkeypatch.setattr(leases, "run", self._run)

    def _run(self, client: redis.Redis, call: scripts.Call) -> Reply:
        if self.breaks:
            raise RedisConnectionError("the connection broke")
        fields = [str(arg) for arg in call.args[2:]]
        self.written.append(dict(zip(fields[::2], fields[1::2], strict=True)))
        return run(client, call)

    def renew(self, times: int = 1) -> None:
        for _ in range(times):
            self._lease._renew()  # pyright: ignore[reportPrivateUsage]

    def shown(self) -> dict[str, str]:
        values = cast(
            "list[bytes | None]", self.client.hmget(keys.worker(WORKER), list(self.vitals))
        )
        return dict(zip(self.vitals, map(text, values), strict=True))


@pytest.fixture
def bench(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> VitalsBench:
    return VitalsBench(client, monkeypatch)


def test_changed_vitals_are_written_once_per_lease(bench: VitalsBench) -> None:
    bench.renew()
    bench.vitals = {"running": 2, "pages_used": 7}
    bench.renew(RENEWALS)
    assert bench.written == [
        {"running": "1", "pages_used": "7"},
        *[{}] * (RENEWALS - 1),
        {"running": "2"},
    ]
    assert bench.shown() == {"running": "2", "pages_used": "7"}


def test_unchanged_vitals_are_not_written_again(bench: VitalsBench) -> None:
    bench.renew(3 * RENEWALS)
    assert [written for written in bench.written if written] == [
        {"running": "1", "pages_used": "7"}
    ]


def test_all_vitals_are_written_after_a_failed_renewal(bench: VitalsBench) -> None:
    """After a failed renewal all vitals are written, since Redis may have restarted and lost its
    last writes.
    """
    bench.renew(2)
    bench.breaks = True
    bench.renew()
    bench.breaks = False
    bench.client.hdel(keys.worker(WORKER), "pages_used")
    bench.renew()
    assert bench.shown() == {"running": "1", "pages_used": "7"}
