"""The impure part of the conductor: the only one that uses Redis, clocks and signals."""

from fleet.conductor.driver.loop import Driver, run_conductor

__all__ = ["Driver", "run_conductor"]
