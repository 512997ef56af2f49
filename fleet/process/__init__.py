"""Utilities of operating-system processes: threads, titles, sockets, ports, files of one user.
Knows no fleet.
"""
