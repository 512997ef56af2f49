"""Chaos's own error: it could not be run, which says nothing of what the fleet stands."""

from fleet.core.errors import FleetError


class ChaosError(FleetError):
    """An option that will not do, or a fleet that fails while nobody disturbs it; the message says what and how to mend it."""

    code = "chaos_failed"
