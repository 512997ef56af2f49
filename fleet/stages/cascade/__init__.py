"""Stages of the graph `cascade`: recogniser, language model, voice."""
