"""`fleet bench`: what a fleet delivers, measured from outside, beside the reference implementation on the same machine.

`main` is the command; `trace` and `stats` are pure; the others measure. Knows no model: stages and media come from the graph.
"""
