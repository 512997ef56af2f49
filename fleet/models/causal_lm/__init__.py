"""Any causal language model of `transformers`, run unmodified on paged KV through its attention
interface.
"""
