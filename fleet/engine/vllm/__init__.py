"""vLLM as an engine. Only its builder imports this package: no other process of the fleet imports
vLLM.
"""
