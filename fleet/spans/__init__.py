"""Divided models: ranges of one model's layers in several processes. The README is the way in."""
