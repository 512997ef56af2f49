"""A worker process: ties control, transfer, engine and stages together. `loop` has its main loop.
Knows no model.
"""
