"""Conversations saved during `fleet chaos`, without a fleet: the moment of a fault, the check of
each file, the report.
"""

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from fleet.config import load_config
from fleet.core.errors import FleetError, NotFound
from fleet.core.session_messages import SessionInfo
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.requests import make_save_tasks
from fleet.lab.faults.save_clock import SaveClock
from fleet.lab.faults.save_report import is_struck, reason_lines, report_saves
from fleet.lab.faults.saves import Save, SavedConversation, SaveLoad, SaveSurroundings, SaveTask
from fleet.lab.faults.schedule import REDIS, FaultKind
from fleet.lab.faults.session_files import damage_of
from fleet.worker.sessions.client import SessionFile
from tests.support import wait_until
from tests.unit.test_chaos import answering, events

STAGE, PROCESSES = "lm", ("lm@h:1:a", "lm.span@h:2:b", "lm.span@h:3:c")
TASK = SaveTask(name="talk", body=b"0", loaded="talk-loaded", body_loaded=b"1")


def session(
    num_rows: int = 2, *, fill: int = 7, part: str = "1", row_bytes: int = 16
) -> SessionFile:
    """Return a saved session of two layers, of which layer `part` is filled with the byte
    `fill`.
    """
    info = SessionInfo(
        num_rows=num_rows, num_layers=2, layout="float32, 2 heads of 1", checkpoint="c", stage=STAGE
    )
    layers = {
        name: memoryview(bytes([fill if name == part else 7] * num_rows * row_bytes))
        for name in ("0", "1")
    }
    return SessionFile(info=info, parts={"keys": memoryview(bytes(8 * num_rows)), **layers})


class StoreInMemory:
    """A fake fleet that saves conversations. `saves`: functions that perform the saves after the
    first one. The first save, and saves after these functions, write the reference session.
    """

    def __init__(self, *saves: Callable[[Path], None]) -> None:
        self.saves = list(saves)
        self.loaded: list[str] = []
        self.num_saves = 0

    def processes_of(self, stage: str, name: str) -> tuple[str, ...]:
        return PROCESSES

    def save(self, stage: str, name: str, file: Path) -> int:
        self.num_saves += 1
        # The first save is the reference.
        (self.saves.pop(0) if self.num_saves > 1 and self.saves else session().write)(file)
        return 2

    def load(self, stage: str, name: str, file: Path) -> None:
        SessionFile.read(file)
        self.loaded.append(name)


def fail(error: Exception, *, damaging: bool = False) -> Callable[[Path], None]:
    def save(file: Path) -> None:
        if damaging:
            file.write_bytes(b"half")
        raise error

    return save


@contextmanager
def saved(
    store: StoreInMemory,
    folder: Path,
    *,
    num_saves: int = 4,
    exact: bool = True,
    longest_s: float = 30.0,
) -> Iterator[list[SavedConversation]]:
    """Save a conversation `num_saves` times, each in a second of fake time; the yielded result is
    complete after the block.
    """
    seconds = itertools.count()
    result: list[SavedConversation] = []
    with answering(events("abc", b"")) as gateway:
        around = SaveSurroundings(
            gateways=Gateways([gateway.url]),
            store=store,
            stages=(STAGE,),
            folder=folder,
            exact=exact,
            longest_s=longest_s,
        )
        load = SaveLoad([TASK], around)
        load.record_reference(lambda: None)
        with load.running(lambda: float(next(seconds)), lambda: None):
            wait_until(lambda: store.num_saves > num_saves, "the saves")
            yield result
        result.extend(load.finish())


def run_saves(store: StoreInMemory, folder: Path, *, exact: bool = True) -> SavedConversation:
    with saved(store, folder, exact=exact) as result:
        pass
    return result[0]


def test_conversation_is_saved_until_the_end_then_loaded_and_continued(tmp_path: Path) -> None:
    store = StoreInMemory()
    conversation = run_saves(store, tmp_path)
    assert len(conversation.saves) >= 4 and not conversation.wrong and conversation.turns >= 2
    assert all(save.num_rows == 2 and save.processes == PROCESSES for save in conversation.saves)
    assert not any(save.failed or save.wrong for save in conversation.saves)
    assert store.loaded == ["talk-loaded"]


def test_save_that_fails_with_an_error_is_counted_and_not_wrong(tmp_path: Path) -> None:
    store = StoreInMemory(
        fail(NotFound("no worker of lm caches it")), fail(OSError("no space left"))
    )
    conversation = run_saves(store, tmp_path)
    reasons = [save.failed for save in conversation.saves if save.failed]
    assert reasons == ["not_found: no worker of lm caches it", "OSError: no space left"]
    assert not conversation.wrong and not any(save.wrong for save in conversation.saves)
    assert conversation.turns >= 3, "after a failed save the conversation has another turn"


@pytest.mark.parametrize(
    ("save", "wrong"),
    [
        (
            fail(FleetError("the worker is gone"), damaging=True),
            "was changed by a save that failed",
        ),
        (session(3).write, "has SessionInfo(num_rows=3"),
        (session(fill=8).write, "its parts 1 are not those of the undisturbed session"),
        (lambda file: file.write_bytes(b"half"), "is not the file of a session"),
    ],
    ids=["changed by a failed save", "other rows", "other values", "damaged"],
)
def test_wrong_file_is_noticed(save: Callable[[Path], None], wrong: str, tmp_path: Path) -> None:
    conversation = run_saves(StoreInMemory(save), tmp_path)
    assert [wrong in one.wrong for one in conversation.saves if one.wrong] == [True]


def test_other_rows_are_not_wrong_without_invariant_numerics(tmp_path: Path) -> None:
    conversation = run_saves(StoreInMemory(session(3).write), tmp_path, exact=False)
    assert not any(one.wrong for one in conversation.saves)


def test_save_that_takes_too_long_is_wrong_also_if_it_fails(tmp_path: Path) -> None:
    with saved(StoreInMemory(fail(FleetError("no answer"))), tmp_path, longest_s=0.5) as result:
        pass
    first, second = result[0].saves[:2]
    for save, how in ((first, "server_error: no answer"), (second, "whole")):
        assert re.fullmatch(rf"it took 1 s from \d s on, more than 0 \({how}\)", save.wrong)


def test_file_that_a_save_leaves_is_wrong(tmp_path: Path) -> None:
    def leave(file: Path) -> None:
        session().write(file)
        file.with_name(f"{file.name}.123").write_bytes(b"half")

    assert run_saves(StoreInMemory(leave), tmp_path).wrong == (
        "0-lm.safetensors.123: is left by a save",
    )


def test_last_file_that_does_not_load_is_wrong(tmp_path: Path) -> None:
    store = StoreInMemory()

    def refuse(stage: str, name: str, file: Path) -> None:
        raise FleetError("the file has 2 layers")

    store.load = refuse
    assert run_saves(store, tmp_path).wrong == (
        "its last file of lm could not be loaded and saved again: the file has 2 layers",
    )


def test_damaged_reference_ends_the_run(tmp_path: Path) -> None:
    def damaged(stage: str, name: str, file: Path) -> int:
        file.write_bytes(b"half")
        return 2

    store = StoreInMemory()
    store.save = damaged
    with pytest.raises(ChaosError, match="although no fault was injected"), saved(store, tmp_path):
        pass


@pytest.mark.parametrize(
    ("changed", "damage"),
    [
        (session(), ""),
        (
            SessionFile(
                info=session().info,
                parts={"keys": memoryview(bytes(16)), "0": memoryview(bytes(32))},
            ),
            "the session lacks 1",
        ),
        (
            SessionFile(info=session(3).info, parts=session().parts),
            "the part 0 of the session has 32 bytes, not 48",
        ),
        (session(row_bytes=0), "the part 0 of the session has 0 bytes, not 32"),
    ],
)
def test_file_is_whole_if_every_layer_has_the_rows_that_it_says(
    changed: SessionFile, damage: str, tmp_path: Path
) -> None:
    file = tmp_path / "s.safetensors"
    changed.write(file)
    found = damage_of(file)
    assert found.startswith(str(file)) and damage in found if damage else found == ""


def test_fault_waits_for_the_next_save_of_its_stage() -> None:
    clock, found = SaveClock(), []
    with clock.saving(STAGE, PROCESSES):
        assert clock.next_save(STAGE, share=0.0, timeout_s=0.01) is None, "this one began before"
        waiting = threading.Thread(
            target=lambda: found.append(clock.next_save(STAGE, share=0.0, timeout_s=20))
        )
        waiting.start()
        with clock.saving("other", ()):
            waiting.join(0.01)
        assert not found
        while not found:
            with clock.saving(STAGE, PROCESSES):
                waiting.join(0.1)
    (save,) = found
    assert (
        save.number > 2
        and save.workers_of("lm") == ["lm@h:1:a"]
        and save.workers_of("lm.span") == list(PROCESSES[1:])
    )
    assert not clock.is_open(save)


def fault(target: str, at_s: float, until_s: float, role: str = "lm.span") -> InjectedFault:
    return InjectedFault(
        role=role,
        kind=FaultKind.STOP,
        target=target,
        requests=(),
        at_s=at_s,
        until_s=until_s,
        recovered_s=1.0,
    )


SAVE = Save(conversation=0, stage=STAGE, began_s=2.0, ended_s=3.0, processes=PROCESSES)


@pytest.mark.parametrize(
    ("fault", "struck"),
    [
        (fault(PROCESSES[1], 2.5, 2.5), True),
        (fault(PROCESSES[1], 1.0, 2.5), True),
        (fault(PROCESSES[1], 1.0, 1.5), False),
        (fault("lm.span@h:9:z", 2.5, 2.5), False),
        (fault("redis at port 1", 1.0, 2.5, REDIS), True),
    ],
    ids=["sent during it", "stopped before", "ended before", "another process", "in Redis"],
)
def test_save_is_struck_by_a_fault_of_its_processes(fault: InjectedFault, struck: bool) -> None:
    assert is_struck(SAVE, fault) == struck


def test_failed_saves_are_counted_by_reason() -> None:
    def failed(reason: str, began_s: float) -> Save:
        return msgspec.structs.replace(SAVE, began_s=began_s, ended_s=began_s + 0.5, failed=reason)

    gone = [
        failed(f"server_error: the worker lm@h:{pid}:a is gone after {pid} s", at_s)
        for pid, at_s in ((1, 2.0), (22, 2.2))
    ]
    late = failed("not_found: worker lm@h:1:a has left", 8.0)
    wrong = msgspec.structs.replace(SAVE, began_s=9.0, ended_s=9.1, wrong="file: lacks 1")
    report = report_saves(
        (
            SavedConversation(
                saves=(*gone, late, wrong), turns=3, wrong=("turn 2 was lost: no end",)
            ),
        ),
        (fault(PROCESSES[1], 2.3, 2.3),),
    )
    assert report is not None and (report.saves, report.whole, report.struck) == (4, 0, 2)
    assert report.struck_by == {"SIGSTOP lm.span": 2}
    assert reason_lines(report) == [
        "2 saves struck by a fault failed: server_error: the worker … is gone after … s",
        "1 save before or after a fault failed: not_found: worker … has left",
    ]
    assert report.wrong == (
        "save of conversation 0: file: lacks 1",
        "conversation 0: turn 2 was lost: no end",
    )
    assert report_saves((), ()) is None


def test_conversations_follow_from_the_seed_and_half_are_sampled() -> None:
    config = load_config(None, ("graph=text",))
    tasks = make_save_tasks("m", config, 3, 4)
    assert tasks == make_save_tasks("m", config, 3, 4) and tasks != make_save_tasks(
        "m", config, 4, 4
    )
    bodies = [msgspec.json.decode(task.body) for task in tasks]
    assert [body["temperature"] for body in bodies] == [0.0, 0.9, 0.0, 0.9]
    assert [body["prompt_cache_key"] for body in bodies] == [task.name for task in tasks]
    loaded = msgspec.json.decode(tasks[0].body_loaded)
    assert loaded == {**bodies[0], "prompt_cache_key": tasks[0].loaded}
