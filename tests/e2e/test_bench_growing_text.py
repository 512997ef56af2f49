"""The benchmark of texts that grow, on small fleets: every speaker is heard over each transport
that the graph serves. Times depend on the machine, so they are measured and not tested.
"""

from pathlib import Path

import pytest

from fleet.lab.measure.growing_text import CALL, SOCKET, GrowingTextResult
from tests.bench_reports import run_bench
from tests.e2e.fleets import FAKE
from tests.support import set_options

NUM_SPEAKERS = 3
CASCADE = ("graph=cascade", "checkpoint=tiny", "device=cpu", "transfer.kind=redis")


@pytest.mark.one_in(11, "benchmarks")
@pytest.mark.parametrize(
    ("settings", "served"),
    [(CASCADE, {SOCKET, CALL}), (FAKE, {CALL})],
    ids=["a voice of its own", "a model that answers in speech"],
)
def test_every_speaker_is_heard_over_each_served_transport(
    tmp_path: Path, settings: tuple[str, ...], served: set[str]
) -> None:
    options = set_options(*settings, f"data_dir={tmp_path}")
    found = run_bench(
        tmp_path,
        GrowingTextResult,
        "growing_text",
        "--growing-text",
        "--up",
        "--requests",
        str(NUM_SPEAKERS),
        *options,
    )
    assert set(found.refused) == {SOCKET, CALL} - served
    for transport in served:
        seeds = [each.seed for each in found.spoken if each.transport == transport]
        assert seeds == list(range(1, NUM_SPEAKERS + 1))
