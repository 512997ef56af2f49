"""The laboratory: measurements, fault injection, the training of Pocket, and their reports. Uses a
fleet from outside; serving imports none of it.
"""
