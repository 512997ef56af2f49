"""Audio as the API sends it: `pcm16`. Source: OpenAI's reference, "24kHz, mono, little-endian"."""

PCM_RATE_HZ = 24_000
BYTES_PER_SAMPLE = 2
BYTES_PER_S = PCM_RATE_HZ * BYTES_PER_SAMPLE
