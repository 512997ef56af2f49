"""Audio of a voice session: input buffer, voice activity, ends of turns, playback position, and the
words that were played.
"""
