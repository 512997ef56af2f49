"""HTTP itself: connections, bodies, access rules, errors, event streams. Knows no request of the
model.
"""
