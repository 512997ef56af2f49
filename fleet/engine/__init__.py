"""Engines: the batch loop inside a worker. `base` is the contract; knows no Redis and no stage name."""
