"""Pocket: a small checkpoint trained from scratch on synthetic speech, so that a fleet can talk on any computer.

Start at `recipe`, which is the order of things: `corpus` writes what Pocket is taught to say and to answer, `teacher` speaks it,
`speech` and `hearing` turn that into data, `train` trains each part, `export` makes one folder of them, `judge` finds out what
it can. `shape` is what all of them agree on; `checkpoints` holds what ships.
"""
