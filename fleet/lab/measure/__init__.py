"""`fleet bench`: measurements of a fleet, of its parts and of a GPU.

A measurement is a module of this package or of `fleet.lab.studies` that declares a `Measurement`
named `MEASUREMENT`. The declaration has the options, the text for `--help`, and the function that
measures. The function returns a `fleet.lab.report.result.Result`, which has the tables, the panels
of the picture, the targets and the part of the JSON report. No other module names a measurement.
"""
