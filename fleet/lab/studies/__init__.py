"""Studies: proofs that were run once, kept with their date, machine and numbers.

Each is a measurement of `fleet bench` found by its file, as those of `fleet.lab.measure` are.
"""
