"""A worker process: ties control, transfer, engine and stages together. `loop` is the loop on one
screen; knows no model.
"""
