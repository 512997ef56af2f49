"""Moving tensors between workers: NIXL, and only here. Regions are registered once by the worker; knows no request state."""
