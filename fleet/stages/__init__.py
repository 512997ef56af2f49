"""Adapters, which convert chunks to engine inputs and engine outputs to items, and stage builders,
per graph and stage. Knows no Redis and no NIXL.
"""
