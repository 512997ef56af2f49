"""The only package that uses Redis: the table of keys, the fenced scripts, and the clients that
call them. Knows no tensor and no engine.
"""
