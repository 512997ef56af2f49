"""Layers of a span in torch, and their rows as bytes, for anchors and span workers."""
