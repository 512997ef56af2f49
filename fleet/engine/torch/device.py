"""Test of a compute device after a failure. A CUDA context that a kernel has broken stays broken:
every later call fails too.
"""

import torch

from fleet.core.errors import EngineStopped


def check_device(device: torch.device) -> None:
    """Raise EngineStopped if the device cannot compute a single value any more."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise EngineStopped(
            f"device {device} fails every computation ({reason}); it may need a reset"
        ) from error
