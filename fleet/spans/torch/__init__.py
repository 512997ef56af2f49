"""Torch code of divided models: a span's layers, hidden states as bytes, and hashes of prefixes,
for anchors and span workers.
"""
