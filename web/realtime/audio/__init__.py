"""Audio of a voice session: input buffer, voice activity, ends of turns, playback position, and the
words of a response that were played.
"""
