"""Saving of conversations from a worker's cache to files, and loading of saved conversations."""
