"""Connections between the workers that compute the layers of one model: addresses, handshake,
frames, rings.
"""
