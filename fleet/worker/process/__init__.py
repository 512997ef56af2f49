"""The process around a worker: its lease, its registration, its device and its link to Redis.

Knows no task.
"""
