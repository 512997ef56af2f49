"""`fleet bench`: measurements of a fleet, of its parts and of a GPU.

A measurement is a module of this package or of `fleet.lab.studies` that declares a `Measurement`
named `MEASUREMENT`. The declaration has the options, the text for `--help`, and the function that
measures. No other module names a measurement. Its result, a `fleet.lab.report.result.Result`, gives
the tables, the panels of the picture, the targets and the part of the JSON report.
"""
