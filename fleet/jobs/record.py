"""Reads a job from its record in Redis and checks it: a record that `submit` of this version did
not write is not run.
"""

from typing import Any

from rq.exceptions import DeserializationError
from rq.job import Job as RqJob

from fleet.control.jobs import TIMEOUT_S, recorded_arguments
from fleet.core.errors import BadInput


class JobRecord(RqJob):
    """rq's job, read from an untrusted record. `refusal`: the reason why the record must not be
    run; "" if the record may be run.

    Invariants: only a function in `FUNCTIONS` is imported and called. Callbacks and webhooks that
    the record names are never called or sent.
    """

    refusal: str = ""

    def restore(self, raw_data: Any) -> None:
        super().restore(raw_data)
        self.refusal = self._refusal()
        self._success_callback_name = None
        self._failure_callback_name = None
        self._stopped_callback_name = None
        self.webhooks = []
        if self.refusal:
            self.retries_left = self.repeats_left = None
            self._func_name = "refused"
            self._instance = None
            self._args = ()
            self._kwargs = {}

    def _refusal(self) -> str:
        if (
            self._success_callback_name
            or self._failure_callback_name
            or self._stopped_callback_name
            or self.webhooks
        ):
            return (
                "its record names calls that follow it; submit it with `fleet jobs submit` "
                "or POST /v1/fleet/jobs"
            )
        if self.timeout is None or not 0 < self.timeout <= TIMEOUT_S:
            return (
                f"its record gives it no time limit from 1 to {TIMEOUT_S} s; submit it with "
                "`fleet jobs submit`"
            )
        try:
            recorded_arguments(self)
        except BadInput as error:
            return error.message
        except DeserializationError as error:
            return f"its record cannot be read ({error}); submit it with `fleet jobs submit`"
        return ""
