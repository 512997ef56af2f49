"""Speculative decoding: drafters, their choice and acceptance, EAGLE-3 heads, and their training
while the fleet serves. The README is the way in.
"""
