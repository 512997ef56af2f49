"""Adapters: chunks <-> engine inputs and outputs, per graph and stage. Knows no Redis and no
NIXL.
"""
