"""`fleet bench`: a fleet measured through its API, and compared with the reference implementation
on the same machine.

`main` is the command. The result of each measurement declares its tables, panels and targets (see
`result`), and `report` collects them. `answer_timing`, `playback` and `split` are pure. Knows no
model: stages and media come from the graph.
"""
