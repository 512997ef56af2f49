"""Engines: the batch loop inside a worker. `base` is the contract. Knows no Redis and no stage
name.
"""
