"""Pocket: a small checkpoint trained from scratch on synthetic speech, so that a fleet can talk on
any computer.

Start at `recipe`, which lists the steps in order: `corpus` generates the dialogues and sentences,
`teacher` synthesizes their speech, `speech` and `hearing` turn it into data sets, `train` trains
each part, `export` writes the checkpoint folder, `judge` evaluates it. `shape` holds the sizes and
ids that these modules share. The shipped weights are in `fleet/checkpoints`.
"""
