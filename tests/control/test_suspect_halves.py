"""Tasks over which workers died together are separated by halves: the one that kills workers is
found in few deaths, and the others continue meanwhile.
"""

import math
from collections.abc import Sequence

import pytest

from fleet.control import keys, scripts
from fleet.control.connect import run, text, texts
from fleet.control.dead_letters import read_letters
from fleet.core.ids import Epoch, RequestId, WorkerId
from tests.control_plane import MAX_DEATHS, ROLE, STAGE, Control
from tests.support import stream_entries

REQUESTS = [RequestId(f"req-{number:02}") for number in range(8)]


class Workers:
    """Workers of one role, which claim as real ones do: grants that run without other tasks are
    reserved with their whole group. A worker that runs a request in `poison` dies.
    """

    def __init__(self, control: Control, poison: Sequence[RequestId]) -> None:
        self.control, self.poison = control, set(poison)
        self.num_deaths = 0
        self.batches: list[list[RequestId]] = []
        for request in REQUESTS:
            assert control.submit(request, bound=99)[0] == "ok"

    def run_a_batch(self) -> None:
        """Let a new worker claim what it can, and run it until all end or the worker dies."""
        worker = WorkerId(f"{ROLE}@test:{len(self.batches) + 10}:x")
        self.control.register(worker)
        batch = self.claim_group(worker) or self.claim_all(worker)
        self.batches.append([request for request, _ in batch])
        if self.poison & set(self.batches[-1]):
            self.num_deaths += 1
            self.control.leave(worker, died=True)
            return
        for request, epoch in batch:
            assert self.control.append(epoch, finish=True, request=request) == "ok"
        self.control.leave(worker)

    def grants(self) -> list[dict[str, str]]:
        entries = [
            entry
            for stream in keys.role_streams(ROLE)
            for entry in stream_entries(self.control.client, stream)
        ]
        return [
            {"id": text(entry), **{text(name): text(value) for name, value in fields.items()}}
            for entry, fields in entries
        ]

    def claim_group(self, worker: WorkerId) -> list[tuple[RequestId, Epoch]]:
        grant = next((grant for grant in self.grants() if grant["a"]), None)
        if grant is None:
            return []
        request, epoch = RequestId(grant["r"]), Epoch(int(grant["e"]))
        call = scripts.reserve(worker, ROLE, grant["id"], request, STAGE, epoch)
        answer, _, *others = texts(run(self.control.client, call))
        assert answer == "ok"
        group = [(request, epoch)]
        group += [
            (RequestId(other), Epoch(int(at)))
            for other, _, at in zip(others[::3], others[1::3], others[2::3], strict=True)
        ]
        for request, epoch in group:
            assert self.control.claim(epoch, worker, request) == "ok"
        return group

    def claim_all(self, worker: WorkerId) -> list[tuple[RequestId, Epoch]]:
        claimed: list[tuple[RequestId, Epoch]] = []
        for grant in self.grants():
            request, epoch = RequestId(grant["r"]), Epoch(int(grant["e"]))
            if request in REQUESTS:
                assert self.control.claim(epoch, worker, request) == "ok"
                claimed.append((request, epoch))
        return claimed


@pytest.mark.parametrize("position", range(len(REQUESTS)))
def test_request_that_kills_workers_is_found_among_others_in_few_deaths(
    control: Control, position: int
) -> None:
    workers = Workers(control, [REQUESTS[position]])
    while len(read_letters(control.client)) == 0 and len(workers.batches) < 30:
        workers.run_a_batch()
    assert [letter.request for letter in read_letters(control.client)] == [REQUESTS[position]]
    assert workers.num_deaths == MAX_DEATHS + math.log2(len(REQUESTS))
    sizes = [len(batch) for batch in workers.batches if REQUESTS[position] in batch]
    assert sizes == [8, 8, 4, 2, 1], "a half is divided again"


def test_all_others_end(control: Control) -> None:
    poison = [REQUESTS[1], REQUESTS[6]]
    workers = Workers(control, poison)
    while any(grant["r"] in REQUESTS for grant in workers.grants()):
        workers.run_a_batch()
    assert sorted(letter.request for letter in read_letters(control.client)) == poison
    for request in REQUESTS:
        if request not in poison:
            assert control.task(request=request)["state"] == "finished"


def test_half_that_a_worker_reserves_is_granted_to_no_other(control: Control) -> None:
    workers = Workers(control, [REQUESTS[0]])
    for _ in range(MAX_DEATHS):
        workers.run_a_batch()
    groups = {grant["a"] for grant in workers.grants() if grant["r"] in REQUESTS}
    assert len(groups) == 2 and "1" not in groups
    worker = WorkerId(f"{ROLE}@test:9:x")
    control.register(worker)
    held = workers.claim_group(worker)
    assert len(held) == len(REQUESTS) / 2
    assert groups > {grant["a"] for grant in workers.grants() if grant["r"] in REQUESTS}
