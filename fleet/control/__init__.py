"""The only package that uses Redis: key table, fenced scripts, and the clients that call them.
Knows no tensor and no engine.
"""
