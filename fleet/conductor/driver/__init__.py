"""The impure part of the conductor: it may touch Redis, clocks and signals, so that the rest need not."""

from fleet.conductor.driver.loop import Driver, run_conductor

__all__ = ["Driver", "run_conductor"]
