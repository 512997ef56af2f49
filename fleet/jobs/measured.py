"""The deployment that the jobs of this process measure. Runs nothing."""

from contextvars import ContextVar
from dataclasses import dataclass

from fleet.config import FleetConfig

TEMPORARY = "tmp"
"""The part of a job's folder that is removed when the job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`url`: the gateway's address, as this process reaches it."""

    config: FleetConfig
    url: str


MEASURED: ContextVar[Measured] = ContextVar("measured")
"""Set by the worker before it runs a job, because rq calls a job's function with the arguments in
its record only.
"""
