"""Conversations saved from a worker's cache, and loaded into it."""
