"""The work of one request in a worker: its edges, its chunks in and out, and its hand-off.

Knows no loop.
"""
