"""Engines: the batch loop inside a worker. `base` is the interface that every engine implements.
Knows no Redis and no stage name.
"""
