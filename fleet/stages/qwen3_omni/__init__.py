"""Adapters and builders of the Qwen3-Omni stages: chunks to engine inputs, engine outputs to
items.
"""
