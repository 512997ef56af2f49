"""Studies: proofs that were run once, kept with their date, machine and numbers.

A study is a measurement of `fleet bench`, found by its file as the others are.
"""
