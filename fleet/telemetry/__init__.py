"""Statistics, traces and views of the fleet, for operators. Pure; no decision depends on it.

`counts` and `vitals` hold the statistics that processes publish; `trace`, `views` and `routes` hold
the structures that operators read. `condition` concludes from them in a sentence how the fleet is.
"""
