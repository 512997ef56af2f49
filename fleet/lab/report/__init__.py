"""Reports of measurements: statistics, machine description, tables, pictures, JSON and progress
display. Independent of what is measured.
"""
