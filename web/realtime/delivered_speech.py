"""The speech of a response: the audio in the client's format, and the text, the audio and the times
of the words as an item of the conversation records them. Knows no event and no client.
"""

from dataclasses import dataclass

import numpy as np

from web.gateway.answer import BYTES_PER_SAMPLE
from web.gateway.answer_words import WordEnd
from web.realtime.audio.client_audio import in_format, lookahead
from web.realtime.audio.formats import OUTPUT_RATE_HZ, AudioFormat
from web.realtime.audio.played_text import Span, SpeakingRate, find_silences, speech_until
from web.realtime.conversation import PlayedSpeech
from web.realtime.generation import Generation

GROUP_SAMPLES = 9
"""Audio pieces have a multiple of this number of samples, so that the base64 of consecutive pieces
can be joined: 9 samples are 18 bytes of PCM16 or three bytes of G.711 at 8 kHz. See
`web.gateway.answer.GROUP_BYTES`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredSpeech:
    """Speech of a response that delivers `generation`, except for the first `skip_chars` of its
    text and the first `skip_samples` of its audio.

    `rate`: learned speaking rates, for estimating the played words if the graph does not tell when
    words end.
    """

    generation: Generation
    voice: str
    skip_chars: int
    skip_samples: int
    rate: SpeakingRate

    @property
    def num_samples(self) -> int:
        """Samples of this response that have been generated."""
        return max(0, len(self.generation.pcm) // BYTES_PER_SAMPLE - self.skip_samples)

    def audio(self, first: int, last: int) -> bytes:
        """Return the audio from sample `first` up to sample `last`, PCM16."""
        begin = max(0, self.skip_samples + first) * BYTES_PER_SAMPLE
        return bytes(self.generation.pcm[begin : (self.skip_samples + last) * BYTES_PER_SAMPLE])

    def num_ready(self, sent: int, form: AudioFormat) -> int:
        """Return the number of samples, after the first `sent`, that can be sent now in a format; 0
        or less if more must be generated first.
        """
        if self.generation.is_ended:
            return self.num_samples - sent
        ready = self.num_samples - sent - lookahead(form)
        return ready - ready % GROUP_SAMPLES

    def client_audio(self, first: int, last: int, form: AudioFormat) -> bytes:
        """Return the audio from sample `first` up to sample `last` in the client's format."""
        return in_format(self.audio, first, last, form)

    def speech(self, text: str, sent: int, played: int) -> PlayedSpeech:
        """Return the record of the speech of `text`, of which `sent` samples were sent and `played`
        samples played.
        """
        if (word_ends := self.word_ends()) is not None:
            return PlayedSpeech(text=text, whole=0, sent=sent, played=played, word_ends=word_ends)
        silent = self._silences()
        whole = speech_until(self.num_samples, silent)
        if not self.generation.is_complete:
            # The words are ahead of the audio, whose full length will never be known.
            whole_s = self.rate.whole_s(self.voice, text, whole / OUTPUT_RATE_HZ)
            whole = int(whole_s * OUTPUT_RATE_HZ)
        return PlayedSpeech(text=text, whole=whole, sent=sent, played=played, silent=silent)

    def learn_rate(self, text: str) -> None:
        """Learn the voice's speaking rate from a complete response, if the rate is needed."""
        is_whole = self.generation.is_complete and not self.skip_samples
        if is_whole and self.generation.word_ends is None:
            speech = speech_until(self.num_samples, self._silences())
            self.rate.learn(self.voice, text, speech / OUTPUT_RATE_HZ)

    def word_ends(self) -> list[WordEnd] | None:
        """Return the ends of the response's words, as far as its audio has been generated; None if
        the graph does not tell them.
        """
        known = self.generation.word_ends
        if known is None:
            return None
        ends = [(chars - self.skip_chars, end - self.skip_samples) for chars, end in known]
        return [end for end in ends if end[0] > 0]

    def _silences(self) -> list[Span]:
        start = self.skip_samples * BYTES_PER_SAMPLE
        return find_silences(np.frombuffer(bytes(self.generation.pcm[start:]), "<i2"))
