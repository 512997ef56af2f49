"""Answers that are kept for days, beyond the retention of requests in Redis: the ones that somebody
will ask about.

`choice` decides from the fleet's events which answers these are, and `store` keeps them in an
SQLite file that all gateways of a host share.
"""
