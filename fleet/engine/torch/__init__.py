"""The torch batch loop for autoregressive stages: paged KV, attention, sampling, scheduling. Knows no model and no stage.

A model joins by a `program` (see `program.py`): how its inputs become rows, how rows become hidden states, what a draw means.
"""
