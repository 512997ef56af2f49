"""Endpoints of the OpenAI API: chat, speech, transcription, models."""
