"""A span process's choice of which payloads NIXL reads: by configuration, network, kernel and
installed libraries.
"""

import pytest

from fleet.config import load_config
from fleet.core.ids import StageName
from fleet.spans.net import ring
from fleet.spans.net.ring import MIN_BLOCK_BYTES
from fleet.transfer.agent import Agent
from fleet.transfer.reach import LOCAL, Reach

LM, NETWORK = StageName("lm"), Reach(("eth0",))


@pytest.mark.parametrize(
    ("settings", "reach", "copies", "rdma", "expected"),
    [
        ("nixl_kib: null", LOCAL, True, False, MIN_BLOCK_BYTES),
        ("nixl_kib: null", LOCAL, False, False, None),
        ("nixl_kib: null", NETWORK, True, False, None),
        ("nixl_kib: null", NETWORK, False, True, MIN_BLOCK_BYTES),
        ("nixl_kib: 3", LOCAL, False, False, 3 << 10),
        ("nixl_kib: 3", NETWORK, False, False, 3 << 10),
        ("nixl_kib: 0", LOCAL, True, True, None),
    ],
)
def test_rows_are_read_by_nixl_where_it_is_faster_or_configured(
    settings: str,
    reach: Reach,
    copies: bool,
    rdma: bool,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "copies_between_processes", lambda: copies)
    monkeypatch.setattr(ring, "has_rdma", lambda: rdma)
    monkeypatch.setattr(ring, "nixl_starts", lambda _: True)
    spans = f"stages.lm.spans={{anchor: '0:0', workers: ['1:output'], {settings}}}"
    for kind, wanted in (("auto", expected), ("redis", None)):
        found = ring.block_reads(
            load_config(None, ("graph=text", f"transfer.kind={kind}", spans)), LM, reach
        )
        assert (found.min_bytes if found is not None else None) == wanted and (
            found is None or found.reach == reach
        )


def test_process_in_which_nixl_does_not_start_sends_all_rows_on_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ImportError("no nixl")

    config = load_config(
        None, ("graph=text", "stages.lm.spans={anchor: '0:0', workers: ['1:output'], nixl_kib: 1}")
    )
    assert ring.block_reads(config, LM, LOCAL) is not None
    monkeypatch.setattr(Agent, "__init__", fail)
    assert ring.block_reads(config, LM, LOCAL) is None and "no nixl" in caplog.text
