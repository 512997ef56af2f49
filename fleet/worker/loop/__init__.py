"""The loop of a worker: one round trip to Redis, one step of the engine, and what happens between
them.
"""
