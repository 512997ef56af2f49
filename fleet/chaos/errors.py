"""Chaos's own errors: it could not be run, or a listener was not answered."""

from fleet.core.errors import FleetError


class ChaosError(FleetError):
    """An option that will not do, or a fleet that fails while nobody disturbs it; the message says what and how to mend it."""

    code = "chaos_failed"


class Unanswered(FleetError):
    """A listener was refused, or found no gateway."""

    code = "unanswered"
