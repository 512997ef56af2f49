"""Versions of the draft head, from the trainer to the workers that use it."""
