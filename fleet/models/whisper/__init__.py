"""The Whisper family of speech recognisers (`WhisperForConditionalGeneration`), in torch."""
