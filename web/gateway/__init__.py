"""The way from a checked chat request to its answer: submission, sampling, text and audio pieces,
metrics. Knows no HTTP.
"""
