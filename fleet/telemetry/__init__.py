"""Statistics, traces and views of the fleet, for operators. Data only; no decision depends on it.

`counts` and `vitals` are what processes count and publish; `trace`, `views` and `routes` are what
operators read.
"""
