"""Captures: answers of a pool, or a share of live ones, are computed once more in the background,
and trained on.
"""
