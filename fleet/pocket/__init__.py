"""Pocket: a small checkpoint trained from scratch on synthetic speech, so that a fleet can talk on any computer.

`corpus` writes what it is taught to say and to answer, `teacher` speaks it. Neither knows what is trained on them.
"""
