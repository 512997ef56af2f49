"""Answers and incidents that are kept for days, beyond what Redis retains: the answers are the ones
that somebody will ask about.

`choice` decides from the fleet's events which answers these are, and `store` keeps both in an
SQLite file that all gateways of a host share.
"""
