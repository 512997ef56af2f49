"""Qwen3-Omni (Thinker, Talker, Code2Wav): what the torch engine and the tests know of this model family."""
