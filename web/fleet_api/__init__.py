"""Endpoints under /v1/fleet/ (state of the fleet, and operations on it), and the health probes.
Knows no page.
"""
