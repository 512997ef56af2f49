"""An anchor: the worker that owns the requests of a divided model and sends each step through its
route.
"""
