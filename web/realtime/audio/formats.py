"""Audio formats of a voice session: PCM16, and G.711 as telephones send it. Knows no setting."""

from typing import ClassVar

import msgspec
import numpy as np

from fleet.processing import g711

OUTPUT_RATE_HZ = 24_000
"""Rate of the generated audio, in which a session counts positions in a response."""


class PcmFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="audio/pcm"):
    rate: int = OUTPUT_RATE_HZ
    sample_bytes: ClassVar[int] = 2

    @property
    def stride(self) -> int:
        """Samples of generated audio for each sample that the client receives."""
        return 1

    def to_pcm(self, audio: bytes) -> bytes:
        """Return whole samples of this format as PCM16 at the same rate."""
        return audio

    def of_pcm(self, samples: g711.Pcm) -> bytes:
        """Return PCM16 samples in this format, at the same rate."""
        return samples.astype("<i2", copy=False).tobytes()


class _G711Format(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the formats with one byte a sample, which have a single rate."""

    law: ClassVar[g711.Law]
    rate: ClassVar[int] = g711.RATE_HZ
    sample_bytes: ClassVar[int] = 1

    @property
    def stride(self) -> int:
        return OUTPUT_RATE_HZ // g711.RATE_HZ

    def to_pcm(self, audio: bytes) -> bytes:
        return g711.decode(audio, self.law).astype("<i2", copy=False).tobytes()

    def of_pcm(self, samples: g711.Pcm) -> bytes:
        return g711.encode(np.ascontiguousarray(samples, np.int16), self.law)


class PcmuFormat(_G711Format, frozen=True, tag_field="type", tag="audio/pcmu"):
    law: ClassVar[g711.Law] = "mu"


class PcmaFormat(_G711Format, frozen=True, tag_field="type", tag="audio/pcma"):
    law: ClassVar[g711.Law] = "a"


AudioFormat = PcmFormat | PcmuFormat | PcmaFormat
G711_FORMATS: dict[str, AudioFormat] = {"audio/pcmu": PcmuFormat(), "audio/pcma": PcmaFormat()}
