"""The torch batch loop for autoregressive stages: paged KV, attention, sampling, scheduling. Knows
no model and no stage.

A model is added as a `program` (see `program.py`), which turns inputs into embeddings, embeddings
into hidden states, and sampled tokens into outputs.
"""
