"""Divided models: the layers of one model, computed as consecutive ranges by several processes. The
README is the way in.
"""
