"""Reports of measurements: statistics, machine description, tables, pictures, JSON and progress.
Knows no measurement.
"""
