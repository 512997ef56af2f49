"""The route of a divided model:
which span worker has which layers, and its replacement when a span worker is lost.
"""
