"""`fleet bench`: a fleet measured through its API, and compared with the reference implementation on the same machine.

`main` is the command; `answer_timing`, `playback`, `targets` and `split` are pure. Knows no model: stages and media come from the
graph.
"""
