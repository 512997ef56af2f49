"""The conductor's process loop and its reads of Redis: the part of the conductor that uses Redis,
clocks and signals.
"""

from fleet.conductor.driver.loop import Driver, run_conductor

__all__ = ["Driver", "run_conductor"]
