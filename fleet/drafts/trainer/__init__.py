"""Training of draft heads on samples of a target: checks at the door, a bounded replay buffer,
optimizer windows.

Everything is in one process and knows neither Redis nor transfers: samples are tensors, and the
target is two functions.
"""
