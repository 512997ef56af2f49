"""Endpoints under /v1/fleet/, and the probes: state of the fleet, and operations on it. Knows no
page.
"""
