"""Base of all request bodies."""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Base of all request bodies: types are strict; unknown keys are kept for the check against the
    route's field table.

    Pydantic collects all errors of a body before it raises them, so lists have `fail_fast` and
    objects `max_keys`.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
