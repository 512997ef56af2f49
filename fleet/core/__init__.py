"""Shared data types: ids, chunks, requests, events, errors, clocks. Standard library and msgspec
only.
"""
