"""A span worker: the process that computes a range of layers for an anchor."""
