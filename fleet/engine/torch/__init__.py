"""The torch batch loop for autoregressive stages: paged KV, attention, sampling, scheduling. Knows
no model and no stage.

A model is added as a `program` (see `program.py`): how inputs become rows, rows hidden states, and
draws outputs.
"""
