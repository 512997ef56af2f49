"""The route of a divided model: the choice of span workers and their layers, and the replacement of
lost span workers.
"""
