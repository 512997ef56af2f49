"""The run of one batch, from its check to its output files. A run can be killed at any point: the
next one continues, and every line is answered once. Knows no queue of jobs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec

from fleet.batches.asking.answers import AnswerFiles
from fleet.batches.asking.gateway import READ_S, LineGateway, unanswered
from fleet.batches.asking.runner import answer_lines
from fleet.batches.lines import BatchLine, find_faults, read_lines
from fleet.batches.records import (
    ENDED,
    Batch,
    BatchStatus,
    LineCounts,
    LineFault,
    LineFaults,
    error_file_of,
    output_file_of,
)
from fleet.batches.store import BatchStore
from fleet.core.errors import FleetError, NotFound

SAVE_EVERY_S = 1.0
MAX_STARTS = 5
"""Largest number of consecutive starts without a newly answered line; at the next start the batch
fails. A run that ends without an error resets the count.
"""
END_REASONS: dict[BatchStatus, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the batch's completion window ended before this line's answer"),
}


class BatchRun:
    """A run of a batch. `on_progress`: called with the total numbers of answered lines, about once
    per second. `part_s`: seconds after which the run begins no further line, so that other jobs can
    run.
    """

    def __init__(
        self,
        store: BatchStore,
        batch_id: str,
        on_progress: Callable[[LineCounts], None],
        *,
        max_lines: int,
        concurrency: int,
        part_s: float,
    ) -> None:
        self._store = store
        self._stored = store.load(batch_id)
        self._on_progress = on_progress
        self._max_lines = max_lines
        self._concurrency = concurrency
        self._ends_s = time.monotonic() + part_s
        self._saved_s = 0.0

    @property
    def _batch(self) -> Batch:
        return self._stored.batch

    async def run(self, gateway: LineGateway) -> Batch:
        """Continue the batch until it ends or `part_s` is over; return the batch.

        Raises: Conflict if another process runs the batch; FleetError or OSError for a failure
        after which the batch may be run again (see `MAX_STARTS`).
        """
        batch_id, files = self._batch.id, self._store.files
        if self._batch.status in ENDED:
            return self._batch
        output, errors = (
            files.prepare(output_file_of(batch_id)),
            files.prepare(error_file_of(batch_id)),
        )
        with closing(AnswerFiles(output, errors)) as answers:
            # what another process may have written before this one had the files
            self._stored = self._store.load(batch_id)
            try:
                if self._batch.status not in ENDED:
                    await self._run(answers, gateway)
            except (FleetError, OSError) as error:
                self._save(problem=str(error))
                raise
        return self._batch

    async def _run(self, answers: AnswerFiles, gateway: LineGateway) -> None:
        if not self._may_start(len(answers.done)):
            return
        if self._batch.status == "validating" and not self._begin():
            return
        await answer_lines(
            self._lines_of_part(),
            gateway,
            answers,
            self._concurrency,
            lambda: self._go_on(answers),
        )
        total = self._batch.request_counts.total
        self._note(answers, num_starts=0)
        if len(answers.done) < total and self._early_end() is None:
            return
        self._finish(answers)

    def _may_start(self, num_answered: int) -> bool:
        """Count this start and return True. After `MAX_STARTS` starts without a newly answered
        line, set the batch to `failed` and return False.
        """
        stored = self._stored
        num_starts = 1 if num_answered > stored.num_answered else stored.num_starts + 1
        if num_starts > MAX_STARTS:
            problem = stored.problem or "its job was killed each time"
            self._fail([LineFault(code="job_failed", message=f"gave up: {problem}")])
            return False
        self._save(num_starts=num_starts, num_answered=num_answered)
        return True

    def _begin(self) -> bool:
        """Check the input file and set the batch to `in_progress`. If the file is missing or has
        faults, set the batch to `failed` and return False.
        """
        batch = self._batch
        try:
            path = self._store.files.content(batch.input_file_id)
        except NotFound as error:
            self._fail([LineFault(code=error.code, message=error.message, param=error.param)])
            return False
        total, faults = find_faults(path, (batch.endpoint,), self._max_lines)
        if faults:
            self._fail(faults)
            return False
        self._update(
            status="in_progress", in_progress_at=self._now(), request_counts=LineCounts(total=total)
        )
        return True

    def _lines_of_part(self) -> Iterator[BatchLine]:
        """Yield the lines of the batch until the part is over."""
        for line in read_lines(self._store.files.content(self._batch.input_file_id)):
            if time.monotonic() > self._ends_s:
                return
            yield line

    def _go_on(self, answers: AnswerFiles) -> bool:
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self._note(answers)
        return self._early_end() is None and time.monotonic() < self._ends_s + READ_S

    def _early_end(self) -> BatchStatus | None:
        """Return `cancelled` or `expired` if the batch must end although lines have no answer yet;
        None if the batch may continue.
        """
        if self._store.cancelled_at(self._batch.id) is not None:
            return "cancelled"
        return "expired" if self._store.clock() >= self._batch.expires_at else None

    def _note(self, answers: AnswerFiles, **changes: object) -> None:
        counts = answers.counts(self._batch.request_counts.total)
        self._update({"num_answered": len(answers.done), **changes}, request_counts=counts)
        self._on_progress(counts)

    def _finish(self, answers: AnswerFiles) -> None:
        """Set the final status and publish the files. In a cancelled or expired batch, each line
        without an answer first gets an error.
        """
        batch, files = self._batch, self._store.files
        status: BatchStatus = "completed"
        if len(answers.done) < batch.request_counts.total:
            status = self._early_end() or "expired"
        self._update(status="finalizing", finalizing_at=batch.finalizing_at or self._now())
        if status != "completed":
            code, message = END_REASONS[status]
            for line in read_lines(files.content(batch.input_file_id)):
                if line.custom_id not in answers.done:
                    answers.add(unanswered(line, code, message))
        self._update(
            status=status,
            output_file_id=self._publish(output_file_of(batch.id), answers.num_completed),
            error_file_id=self._publish(error_file_of(batch.id), answers.num_failed),
            request_counts=answers.counts(batch.request_counts.total),
            **{f"{status}_at": self._now()},
        )

    def _publish(self, file_id: str, num_lines: int) -> str | None:
        files = self._store.files
        if not num_lines:
            files.discard(file_id)
            return None
        files.publish(file_id, f"{file_id}.jsonl", self._stored.output_expiry_s)
        return file_id

    def _fail(self, faults: list[LineFault]) -> None:
        for file_id in (output_file_of(self._batch.id), error_file_of(self._batch.id)):
            self._store.files.discard(file_id)
        self._update(status="failed", failed_at=self._now(), errors=LineFaults(data=tuple(faults)))

    def _update(self, stored: dict[str, object] | None = None, /, **changes: object) -> None:
        """Change and save fields of the batch. `stored`: changed fields of its `StoredBatch`."""
        self._save(batch=msgspec.structs.replace(self._batch, **changes), **(stored or {}))

    def _save(self, **changes: object) -> None:
        self._stored = msgspec.structs.replace(self._stored, **changes)
        self._store.save(self._stored)
        self._saved_s = time.monotonic()

    def _now(self) -> int:
        return int(self._store.clock())
