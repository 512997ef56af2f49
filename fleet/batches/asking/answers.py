"""The files into which answers are written, one line each, once for each line of the input. A line
that a killed process left incomplete is removed. Sends nothing.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleet.batches.records import LineCounts
from fleet.core.errors import Conflict

BEGINNING = b'{"id":"batch_req_'
"""The bytes with which every line begins."""


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's answer to a line. `body` is its JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a line has no response of a gateway."""

    code: str
    message: str


class AnsweredLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output or error file. Source: OpenAI's reference, "request output object"."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class _Answered(msgspec.Struct, frozen=True):
    custom_id: str


_decode = msgspec.json.Decoder(_Answered).decode


class AnswerFiles:
    """The output file and the error file of a batch, which one process at a time may write. `done`:
    ids (`custom_id`) of the lines in either file, also of lines that earlier processes wrote.

    Raises: Conflict if another process writes the files, or if they have other content; OSError.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self._output, self._errors = _AppendedFile(output), _AppendedFile(errors)
        try:
            self._output.lock()
            completed, failed = set(self._output.repair()), set(self._errors.repair())
        except BaseException:
            self.close()
            raise
        self.done = completed | failed
        self.num_completed, self.num_failed = len(completed), len(failed)

    def add(self, line: AnsweredLine) -> None:
        """Append the answer of a line to the output file or the error file, and flush the answer to
        the disk. Raises: OSError.
        """
        assert line.custom_id not in self.done, "a line is answered once"
        encoded = msgspec.json.encode(line) + b"\n"
        if line.is_success:
            self._output.append(encoded)
            self.num_completed += 1
        else:
            self._errors.append(encoded)
            self.num_failed += 1
        self.done.add(line.custom_id)

    def counts(self, total: int) -> LineCounts:
        return LineCounts(total=total, completed=self.num_completed, failed=self.num_failed)

    def close(self) -> None:
        self._output.close()
        self._errors.close()


class _AppendedFile:
    """A file of complete lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def lock(self) -> None:
        """Keep other processes from writing until this file is closed, or the process dies."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Conflict(f"{self._path}: another process writes these answers") from error

    def repair(self) -> Iterator[str]:
        """Yield the ids of the complete lines; after the last id, cut off an incomplete last line.
        Raises: Conflict if the file has anything but answers; its content then stays unchanged.
        """
        num_bytes, torn = 0, b""
        with self._path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    torn = raw
                    break
                yield self._id_in(raw)
                num_bytes += len(raw)
        if not (torn.startswith(BEGINNING) or BEGINNING.startswith(torn)):
            raise self._foreign("its last line")
        os.ftruncate(self.fd, num_bytes)

    def _id_in(self, raw: bytes) -> str:
        try:
            return _decode(raw).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._foreign("a line") from error

    def _foreign(self, line: str) -> Conflict:
        return Conflict(f"{self._path}: {line} is no answer to a batch; name another file")

    def append(self, line: bytes) -> None:
        """Append a line and flush it to the disk. After an error nothing of the line remains.
        Raises: OSError.
        """
        size = os.fstat(self.fd).st_size
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self.fd, left) :]
            os.fsync(self.fd)
        except OSError:
            os.ftruncate(self.fd, size)
            raise

    def close(self) -> None:
        os.close(self.fd)
