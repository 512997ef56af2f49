"""Load of conversations that are saved again and again under faults, each into one file.

A save may fail with an error that gives the cause; the file then keeps its previous content. A
successful save must contain the KV blocks of the undisturbed session, byte by byte. At the end the
last file of each conversation is loaded under another name, saved there, and continued.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from fleet.core.errors import FleetError, NotFound
from fleet.lab.client.errors import ApiError
from fleet.lab.faults.answer import ReceivedAnswer, first_difference, read_answer
from fleet.lab.faults.client_threads import ClientThreads
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.save_clock import SaveClock
from fleet.lab.faults.session_files import damage_of

SAVES_PER_TURN = 8
PAUSE_S = 0.1
"""Pause between two saves of a conversation."""
SAVE_S = 30.0
"""Time, in addition to a lease, within which a save must end: a frozen worker resumes soon after
the lease, and answers or closes the connection.
"""
ENDS_S = 150.0
"""Longest wait for the clients at the end of a run: twice as long as a client waits for a
worker.
"""
ANNOUNCED_S = 10.0
"""Time within which a loaded conversation is known to Redis."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """A save of a conversation and its outcome. `processes`: ids of the worker that cached the
    conversation, then of the span workers of its route; empty if no worker cached the conversation.
    `num_rows`: number of cached positions in the file, 0 if the save failed.

    `failed`: code and message of the error, "" if the save succeeded. `wrong`: mistake in the file
    after the save, or excessive duration, "" if none. Units: seconds since the phase began.
    """

    conversation: int
    stage: str
    began_s: float
    ended_s: float
    processes: tuple[str, ...] = ()
    num_rows: int = 0
    failed: str = ""
    wrong: str = ""


class SavedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a conversation under test. `wrong`: turns that were lost or different, and mistakes
    in its files at the end.
    """

    saves: tuple[Save, ...]
    turns: int
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """A conversation to save. `body`: request that is sent as each turn. `loaded`: name under which
    the file is loaded at the end. `body_loaded`: the same request for the conversation `loaded`.
    """

    name: str
    body: bytes
    loaded: str
    body_loaded: bytes


class SessionStore(Protocol):
    """Saves and loads conversations; `SessionFiles` is the implementation. Raises: FleetError,
    OSError.
    """

    def processes_of(self, stage: str, name: str) -> tuple[str, ...]: ...

    def save(self, stage: str, name: str, file: Path) -> int: ...

    def load(self, stage: str, name: str, file: Path) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSurroundings:
    """What all conversation clients share: the fleet, the folder of the files, and limits. `exact`:
    whether files and answers must equal the undisturbed run byte by byte.

    `longest_s`: duration beyond which a save counts as wrong.
    """

    gateways: Gateways
    store: SessionStore
    stages: Sequence[str]
    folder: Path
    exact: bool
    longest_s: float = SAVE_S


class ConversationSaver:
    """Client of one saved conversation; its methods block the calling thread."""

    def __init__(
        self,
        number: int,
        task: SaveTask,
        around: SaveSurroundings,
        clock: SaveClock,
        threads: ClientThreads,
    ) -> None:
        self._number = number
        self._task = task
        self._around = around
        self._clock = clock
        self._threads = threads
        self._expected: ReceivedAnswer | None = None
        self._saves: list[Save] = []
        self._wrong: list[str] = []
        self._num_turns = 0
        self.now_s: Callable[[], float] = time.perf_counter

    def result(self, *more: str) -> SavedConversation:
        return SavedConversation(
            saves=tuple(self._saves), turns=self._num_turns, wrong=(*self._wrong, *more)
        )

    def record_reference(self) -> None:
        """Save the conversation without faults, as the reference. Raises: ApiError, FleetError,
        OSError.
        """
        self._expected = self._answer(self._task.body)
        for stage in self._around.stages:
            self._around.store.save(stage, self._task.name, self._file(stage))
            self._file(stage).with_suffix(".expected").write_bytes(self._file(stage).read_bytes())
            if damage := damage_of(self._file(stage)):
                raise ChaosError(
                    f"a conversation was not saved, although no fault was injected: {damage}"
                )

    def run(self, step: Callable[[], None]) -> None:
        """Take one turn after another, each followed by saves, until the run finishes or a turn is
        lost. `step` is called after each save.
        """
        while not self._threads.finishing.is_set() and self._take_turn(self._task.body):
            for _ in range(SAVES_PER_TURN):
                failed = [self._save(stage).failed for stage in self._around.stages]
                step()
                if any(failed) or self._threads.finishing.wait(PAUSE_S):
                    break

    def verify(self) -> None:
        """Load the last file of the conversation under another name, save that conversation again
        and compare the two files, then continue it with a turn. Mistakes become part of `result()`.
        """
        task, around = self._task, self._around
        for stage in around.stages:
            again = self._file(stage).with_suffix(".again")
            try:
                around.store.load(stage, task.loaded, self._file(stage))
                self._save_announced(stage, again)
                damage = damage_of(again, self._file(stage))
            except (FleetError, OSError) as error:
                damage = str(error)
            if damage:
                self._wrong.append(
                    f"its last file of {stage} could not be loaded and saved again: {damage}"
                )
        self._take_turn(task.body_loaded)

    def _save_announced(self, stage: str, file: Path) -> None:
        deadline_s = time.monotonic() + ANNOUNCED_S
        while True:
            try:
                self._around.store.save(stage, self._task.loaded, file)
                return
            except NotFound:
                if time.monotonic() > deadline_s:
                    raise
            self._threads.cancelled.wait(PAUSE_S)

    def _file(self, stage: str) -> Path:
        return self._around.folder / f"{self._number}-{stage}.safetensors"

    def _answer(self, body: bytes) -> ReceivedAnswer:
        stream = self._around.gateways.receive(body, self._threads.cancelled.is_set)
        return read_answer(stream.pieces)

    def _take_turn(self, body: bytes) -> bool:
        """Send the request of a turn and return True if it was answered. A lost answer is recorded
        as a mistake, and so is a different one if answers must be exact.
        """
        self._num_turns += 1
        try:
            answer = self._answer(body)
        except ApiError as error:
            self._wrong.append(f"turn {self._num_turns} was lost: {error}")
            return False
        assert self._expected is not None, "recorded before the run"
        difference = first_difference(self._expected, answer)
        if difference is not None and self._around.exact:
            self._wrong.append(
                f"turn {self._num_turns} differs in its {difference.medium} from byte "
                f"{difference.offset} on"
            )
        return True

    def _save(self, stage: str) -> Save:
        file, began_s = self._file(stage), self.now_s()
        before, failed = file.read_bytes(), ""
        processes: tuple[str, ...] = ()
        num_rows = 0
        try:
            processes = self._around.store.processes_of(stage, self._task.name)
            with self._clock.saving(stage, processes):
                num_rows = self._around.store.save(stage, self._task.name, file)
        except FleetError as error:
            failed = f"{error.code}: {error.message}"
        except OSError as error:
            failed = f"{type(error).__name__}: {error}"
        save = Save(
            conversation=self._number,
            stage=stage,
            began_s=began_s,
            ended_s=self.now_s(),
            processes=processes,
            num_rows=num_rows,
            failed=failed,
        )
        self._saves.append(msgspec.structs.replace(save, wrong=self._check(save, before)))
        return self._saves[-1]

    def _check(self, save: Save, before: bytes) -> str:
        """Return the mistake in the file after a save, "" if none. `before`: content of the file
        before the save.
        """
        file, took_s = self._file(save.stage), save.ended_s - save.began_s
        longest_s = self._around.longest_s
        if took_s > longest_s:
            when, how = f"from {save.began_s:.0f} s on", save.failed or "whole"
            return f"it took {took_s:.0f} s {when}, more than {longest_s:.0f} ({how})"
        if save.failed:
            is_kept = file.read_bytes() == before
            return "" if is_kept else f"{file}: was changed by a save that failed"
        return damage_of(file, file.with_suffix(".expected") if self._around.exact else None)


class SaveLoad:
    """Load of saved conversations, each on its own thread."""

    def __init__(
        self, tasks: Sequence[SaveTask], around: SaveSurroundings, clock: SaveClock | None = None
    ) -> None:
        self._around = around
        self._threads = ClientThreads()
        self.clock = clock or SaveClock()
        self._clients = [
            ConversationSaver(number, task, around, self.clock, self._threads)
            for number, task in enumerate(tasks)
        ]

    def record_reference(self, step: Callable[[], None]) -> None:
        """Save each conversation without faults, as the reference. Raises: ChaosError, ApiError,
        FleetError, OSError.
        """
        for client in self._clients:
            client.record_reference()
            step()

    def running(
        self, now_s: Callable[[], float], step: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Save the conversations during the block. `now_s`: clock of the phase. `step`: called
        after each save.
        """
        for client in self._clients:
            client.now_s = now_s
        return self._threads.running(
            len(self._clients), lambda number: self._clients[number].run(step)
        )

    def finish(self, timeout_s: float = ENDS_S) -> tuple[SavedConversation, ...]:
        """Wait for the last saves and verify the files; return the results of the conversations."""
        self._threads.join(timeout_s)
        results = tuple(self._finish(number, client) for number, client in enumerate(self._clients))
        self._threads.cancelled.set()
        return results

    def _finish(self, number: int, client: ConversationSaver) -> SavedConversation:
        if number not in self._threads.ended:
            is_alive = self._threads.is_alive(number)
            cause = "does not end" if is_alive else "failed, as its stack on stderr says"
            return client.result(f"its client {cause}")
        client.verify()
        known = {
            f"{number}-{stage}{end}"
            for stage in self._around.stages
            for end in (".safetensors", ".expected", ".again")
        }
        found = {path.name for path in self._around.folder.glob(f"{number}-*")}
        return client.result(*(f"{name}: is left by a save" for name in sorted(found - known)))
