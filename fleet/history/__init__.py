"""Answers that are kept for days, beyond the retention of requests in Redis: the ones that somebody
will ask about. And the voice sessions, and the incidents.

`choice` decides from the fleet's events which answers these are; `store` keeps them, `sessions` the
sessions, and `incidents` the incidents, in an SQLite file (`file`) that all gateways of a host
share.
"""
