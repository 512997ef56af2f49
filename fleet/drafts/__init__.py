"""Speculative decoding: drafters, the choice among them, EAGLE-3 draft heads, and the training of
heads while the fleet serves. The README is the way in.
"""
