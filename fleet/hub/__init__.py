"""Checkpoints from a model hub: their names, their files on this host, and the download, which
checks every file by its hash. Knows no model and no deployment.
"""
