"""The deployment on which the jobs of this process run. Runs nothing."""

from contextvars import ContextVar
from dataclasses import dataclass

from fleet.config import FleetConfig

TEMPORARY = "tmp"
"""Subfolder of a job's folder that is removed when the job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The deployment on which jobs run: its configuration, and its gateway's address `url` as this
    process reaches it.
    """

    config: FleetConfig
    url: str


MEASURED: ContextVar[Measured] = ContextVar("measured")
"""The deployment for the running job. Set by the worker before it runs a job, because rq passes
only the arguments in the job's record.
"""
