"""Captures: sources of training samples. Live answers, or the answers of a prompt pool, are
computed once more in the background, and their hidden states are sent to the trainer.
"""
