"""Utilities for operating-system processes: background tasks, threads, titles, sockets, ports,
files of one user, and the fleet secret. Knows no deployment.
"""
