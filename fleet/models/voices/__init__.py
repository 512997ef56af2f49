"""Voices: models that speak a clause of text. `base.py` has their interface."""
