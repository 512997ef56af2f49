"""Files and batches as the API shows them, which is also how they are stored, and their ids.
Source: openai 3.57 types (`file_object`, `batch`).
"""

import re
import secrets
import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FILE, BATCH = "file-", "batch_"
FILE_ID = re.compile(r"file-[0-9a-f]{32}(-output|-errors)?")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
OWNER_DIGITS = 8
JSONL = "application/jsonl"
ENDPOINTS = ("/v1/chat/completions", "/v1/audio/speech")
"""Routes to which the lines of a batch may be sent."""
WINDOW, WINDOW_S = "24h", 24 * 3600
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
"""Shortest and longest time for which a file is stored; the longest is the default."""

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file. `purpose` is `batch_output` for the answers and the errors of a batch. Units:
    times are seconds since 1970.
    """

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class LineFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed. `line` is the number of the line of the input file that is at fault, if
    one is.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineFaults(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[LineFault, ...]


class LineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of lines: all, those with a successful answer, and those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Fields that do not apply yet are null. Units: times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineFaults | None = None
    input_file_id: str
    completion_window: str = WINDOW
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = LineCounts()
    metadata: dict[str, str] | None = None
    model: str | None = None
    usage: None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with the notes of its job. `output_expiry_s`: seconds for which output files are
    stored. `num_starts`: starts of the job since a line was last answered or a run ended without an
    error. `num_answered`: number of answered lines when the job last saved it. `problem`: the last
    error that ended the job; "" if there was none. `key`: name of the API key that made the batch,
    whose scopes and limits apply to its lines; "" if no key is required.
    """

    batch: Batch
    output_expiry_s: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)] = MAX_EXPIRY_S
    num_starts: int = 0
    num_answered: int = 0
    problem: str = ""
    key: str = ""


def new_id(prefix: str, owner: str = "") -> str:
    """Return a new id of a file or batch, which contains the owner; ids sort by creation time.
    `owner`: digest of the client's name in hexadecimal digits; "" for no particular client.
    """
    return f"{prefix}{time.time_ns() // 1000:013x}{secrets.token_hex(6)[1:]}{_part_of(owner)}"


def is_owned(record_id: str, owner: str) -> bool:
    """Return True if the id of a file or batch contains `owner` (see `new_id`). Output and error
    files have the owner of their batch.
    """
    return record_id.removesuffix("-output").removesuffix("-errors").endswith(_part_of(owner))


def _part_of(owner: str) -> str:
    return owner[:OWNER_DIGITS].rjust(OWNER_DIGITS, "0")


def output_file_of(batch_id: str) -> str:
    return f"{FILE}{batch_id.removeprefix(BATCH)}-output"


def error_file_of(batch_id: str) -> str:
    return f"{FILE}{batch_id.removeprefix(BATCH)}-errors"
