"""Form of a voice session's audio, as a client sends and hears it. Pure."""

from dataclasses import dataclass

import numpy as np
import soxr

from fleet.lab.client.audio import BYTES_PER_SAMPLE, PCM_RATE_HZ
from fleet.processing import g711


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceFormat:
    """Audio format of a voice session. `type`: name of the format in the session's settings; "" for
    the default, PCM16 at 24 kHz. Any other name stands for G.711 (mu-law). `sample_bytes`: bytes of
    one sample.
    """

    type: str
    rate_hz: int
    sample_bytes: int

    def encode(self, pcm: bytes) -> bytes:
        """Convert PCM16 at 24 kHz to this format."""
        if not self.type:
            return pcm
        samples = np.frombuffer(pcm, "<i2").astype(np.float32)
        slower = soxr.resample(samples, PCM_RATE_HZ, self.rate_hz)
        return g711.encode(np.clip(np.rint(slower), -32768, 32767).astype(np.int16), "mu")

    def pcm(self, audio: bytes) -> bytes:
        """Convert audio of this format to PCM16, without a change of the sample rate."""
        return g711.decode(audio, "mu").astype("<i2").tobytes() if self.type else audio

    def settings(self) -> dict[str, object]:
        """Return the field `format` for the settings of a session's input or output, or {} for the
        default format.
        """
        return {"format": {"type": self.type}} if self.type else {}


PCM = VoiceFormat(type="", rate_hz=PCM_RATE_HZ, sample_bytes=BYTES_PER_SAMPLE)
TELEPHONE = VoiceFormat(type="audio/pcmu", rate_hz=g711.RATE_HZ, sample_bytes=1)
