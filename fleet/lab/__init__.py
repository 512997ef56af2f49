"""Measurements, faults, the training of Pocket and their reports: everything that looks at a fleet
from outside. Serving imports none of it.
"""
