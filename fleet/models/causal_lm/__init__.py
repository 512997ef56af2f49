"""Any causal language model that `transformers` knows, run unmodified on paged KV by way of its attention interface."""
