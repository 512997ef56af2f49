"""Qwen3-Omni (Thinker, Talker, Code2Wav): model code, weights and configuration of this family."""
