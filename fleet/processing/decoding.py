"""Messages between a gateway and its decoder processes: jobs with their limits, and replies. Starts
no process.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import msgspec
import numpy as np

from fleet.core.request import Constraint

MIN_CPU_S, CPU_PER_AUDIO_S = 3.0, 0.1
"""CPU time allowed for a job, in seconds: a fixed part, and a part per second of audio. Eight
channels at 192 kHz take 0.04 s of CPU time per second of audio, a voice recording 0.003 s.
"""
MEMORY_BYTES = 128 * 1024 * 1024
"""Memory that a decoder may use in addition to the file and its samples."""
FILE_COPIES, SAMPLE_COPIES = 4, 3
"""Numbers of copies of a file (as base64 and as bytes) and of its samples that are in memory at one
time.
"""
OUT_OF_MEMORY = 3
"""Exit status of a process that ran out of memory."""
RULE_CPU_S = 2
NO_BASE64 = "?"
"""Text sent in place of a file that cannot be base64; the original may not even be encodable as
UTF-8.
"""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWords:
    """Words of a job's error messages: what its process does, the fault if it crashed, the limit of
    CPU time, and the remedy.
    """

    task: str
    fault: str
    cpu_limit: str
    remedy: str


class AudioFile(msgspec.Struct, frozen=True, kw_only=True):
    """Audio file, as base64 (`text`) or as bytes (`raw`). `where` names the field of the user's
    input.
    """

    where: str
    text: str = ""
    raw: bytes = b""


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Job of a decoder process: the audio files of one request, and its limits. `rate_hz`: sample
    rate of the result. `max_audio_s`: most seconds of audio over all files. `streams`: True to send
    the samples as PCM16 while decoding, in several replies; `files` then has one file.
    """

    files: list[AudioFile]
    rate_hz: int
    max_audio_s: float
    cpu_s: int
    """CPU time for this job in seconds, after which the kernel ends the process."""
    memory_bytes: int
    """Memory that the process may allocate in addition to its memory before the first job."""
    streams: bool = False

    @staticmethod
    def of(
        parts: Sequence[tuple[str, str | bytes]],
        *,
        rate_hz: int,
        max_audio_s: float,
        streams: bool = False,
    ) -> "DecodeJob":
        """Return the job for a request's files, with limits of CPU time and memory that suit their
        size. `parts`: (field name, file) pairs.
        """
        files = [_file(where, data) for where, data in parts]
        size = sum(len(file.text) + len(file.raw) for file in files)
        kept_s = 0.0 if streams else max_audio_s
        samples = int(kept_s * rate_hz) * np.dtype(np.float32).itemsize
        return DecodeJob(
            files=files,
            rate_hz=rate_hz,
            max_audio_s=max_audio_s,
            cpu_s=math.ceil(MIN_CPU_S + CPU_PER_AUDIO_S * max_audio_s),
            memory_bytes=MEMORY_BYTES + FILE_COPIES * size + SAMPLE_COPIES * samples,
            streams=streams,
        )

    @property
    def where(self) -> str:
        return self.files[0].where

    @property
    def words(self) -> JobWords:
        return JobWords(
            task="decoding the audio",
            fault="the audio cannot be decoded",
            cpu_limit=(
                f"{self.cpu_s} s of CPU time, the limit for {self.max_audio_s:g} s of audio "
                "(limits.max_audio_s)"
            ),
            remedy="send it as WAV or FLAC",
        )

    @property
    def parts(self) -> list[tuple[str, str | bytes]]:
        return [(file.where, file.text or file.raw) for file in self.files]


class RuleJob(msgspec.Struct, frozen=True, kw_only=True, tag="rule"):
    """Job of a decoder process: check that an answer can keep the rule `constraint`. `where`: field
    of the user's input that has the rule. `num_ids`: size of the model's vocabulary. `named`: text
    and id of each control token. `cpu_s` and `memory_bytes` mean the same as in `DecodeJob`.
    """

    constraint: Constraint
    where: str
    num_ids: int
    named: tuple[tuple[str, int], ...]
    cpu_s: int = RULE_CPU_S
    memory_bytes: int = MEMORY_BYTES

    @property
    def words(self) -> JobWords:
        return JobWords(
            task="reading the rule for the answer",
            fault="the rule for the answer cannot be read",
            cpu_limit=f"{self.cpu_s} s of CPU time",
            remedy="make it simpler",
        )


Job = DecodeJob | RuleJob


class DecodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a job. `clips`: float32 samples of each file. `code`, `message`, `param`: fields of
    the `FleetError` with which the job was refused; "" and None on success. `pcm`: next PCM16
    samples of a streamed file; b"" in the last reply.
    """

    clips: list[bytes] = []
    pcm: bytes = b""
    code: str = ""
    message: str = ""
    param: str | None = None


def _file(where: str, data: str | bytes) -> AudioFile:
    if isinstance(data, bytes):
        return AudioFile(where=where, raw=data)
    return AudioFile(where=where, text=data if data.isascii() else NO_BASE64)


def write_message(pipe: IO[bytes], message: Job | DecodeReply) -> None:
    """Write a length-prefixed message to a pipe. Raises: OSError if the reading process is gone."""
    body = msgspec.msgpack.encode(message)
    pipe.write(_LENGTH.pack(len(body)))
    pipe.write(body)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> bytes | None:
    """Return the next message of a pipe as encoded bytes; None if the writing process is gone."""
    head = _read(pipe, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = _read(pipe, length)
    return body if len(body) == length else None


def _read(pipe: IO[bytes], size: int) -> bytes:
    """Read `size` bytes of a pipe, which may be unbuffered; less if it ends."""
    read = bytearray()
    while len(read) < size and (piece := pipe.read(size - len(read))):
        read += piece
    return bytes(read)
