"""State of the fleet, traces of requests and counts, as operators read them.

Data only; no decision depends on it.
"""
