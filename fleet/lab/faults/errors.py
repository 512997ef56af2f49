"""Error of `fleet chaos`."""

from fleet.core.errors import FleetError


class ChaosError(FleetError):
    """An invalid option, or a fleet that fails without a fault; the message names the cause and the
    remedy.
    """

    code = "chaos_failed"
