"""Requests of files and batches as types, and their validation. Source: openai 3.57 types. Knows no
stored file.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from fleet.batches.records import ENDPOINTS, MAX_EXPIRY_S, MIN_EXPIRY_S, WINDOW
from fleet.core.errors import UnsupportedValue, quoted
from web.http.json_bounds import max_keys
from web.schema.body import Body
from web.schema.chat import bad_input, parse_json
from web.schema.fields.batches import BATCH, FILE

MAX_METADATA = 16
_NESTED = "expires_after"


class FileExpiry(Body):
    """Time after which a file is deleted, in seconds from its creation."""

    model_config = ConfigDict(strict=False, extra="allow", allow_inf_nan=False, frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class FileForm(Body):
    """Text fields of the form of POST /v1/files; the file is read separately."""

    purpose: str
    expires_after: FileExpiry | None = None

    @property
    def expiry_s(self) -> int:
        return self.expires_after.seconds if self.expires_after is not None else MAX_EXPIRY_S


class BatchBody(Body):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            max_keys(MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: FileExpiry | None = None

    @property
    def output_expiry_s(self) -> int:
        expiry = self.output_expires_after
        return expiry.seconds if expiry is not None else MAX_EXPIRY_S


def parse_file_form(fields: Sequence[tuple[str, str]]) -> FileForm:
    """Validate the text fields of a form, given as (name, value) pairs; clients write the parts of
    `expires_after` as `expires_after[seconds]`. Raises: BadInput, UnsupportedValue naming the
    field.
    """
    parts = {
        name.removeprefix(f"{_NESTED}[").removesuffix("]"): value
        for name, value in fields
        if name.startswith(f"{_NESTED}[")
    }
    values: dict[str, object] = {
        name: value for name, value in fields if not name.startswith(f"{_NESTED}[")
    }
    if parts:
        values[_NESTED] = parts
    FILE.check(values)
    try:
        form = FileForm.model_validate(values)
    except ValidationError as error:
        raise bad_input(error) from error
    if form.purpose != "batch":
        raise UnsupportedValue(
            f"purpose: {quoted(form.purpose)} is not served; use batch: other requests carry "
            "their audio and text themselves",
            param="purpose",
        )
    return form


def parse_batch(body: bytes) -> BatchBody:
    """Parse and validate the body of a new batch. Raises: BadInput, InputTooLarge, UnsupportedValue
    naming the field.
    """
    batch = parse_json(BatchBody, body)
    BATCH.check(batch)
    if batch.endpoint not in ENDPOINTS:
        raise UnsupportedValue(
            f"endpoint: {quoted(batch.endpoint)} is not served in batches; use "
            f"{' or '.join(ENDPOINTS)}",
            param="endpoint",
        )
    if batch.completion_window != WINDOW:
        raise UnsupportedValue(f"completion_window: use {WINDOW}", param="completion_window")
    return batch
