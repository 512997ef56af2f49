"""The graph of a spoken assistant made of three published models: a recogniser, a causal language
model and a voice.

A request runs only the stages that have work: `asr` if its prompt has audio, `tts` alone if the
text to speak is given, `asr` alone for a transcription.
"""

from fleet.core.ids import CLIENT, DECODE, EdgeName, StageName
from fleet.graphs.base import TOKENS, Edge, Graph, Stage
from fleet.graphs.text import LM, language_model

ASR, TTS = StageName("asr"), StageName("tts")
TRANSCRIPT, HEARD = EdgeName("transcript"), EdgeName("heard")
TEXT, SAID, AUDIO = EdgeName("text"), EdgeName("said"), EdgeName("audio")
CLIP_ID = -1
"""Placeholder of an audio clip in `RequestSpec.prompt_ids`, once per clip: no id of a vocabulary.
"""
VOICE_PARAM, LANGUAGE_PARAM, TEMPERATURE_PARAM = "voice", "language", "temperature"
"""Keys of `RequestSpec.params` that the stages read: name of the voice; language code of the
prompt's audio, absent to detect it; temperature of the recognition, absent for the most probable
text.
"""
PROMPT_PARAM, TIMES_PARAM = "prompt", "times"
"""Keys of `RequestSpec.params`: text that precedes the prompt's audio, for names and spellings;
with any value, the transcript has its segments and words with their times.
"""
SPEED_PARAM, CLAUSE_PARAM = "speed", "clause"
"""Keys of `RequestSpec.params`: pace of the voice, a decimal number from 0.25 to 4, 1 if absent;
present if the text to speak is a single clause of a longer text, its place in that text
(`fleet/processing/spoken/given_clause.py`).
"""
TRANSCRIPT_TENSORS = {
    "clip": "int32",
    "sizes": "int32",
    "text": "uint8",
    "ids": "int32",
    "report": "uint8",
}
"""Tensors of a piece of a transcript: the number of its clip in the prompt [1], the size of its
text in bytes [1], the UTF-8 bytes of whole characters, and the recogniser's tokens, from which a
later owner of the task continues; if asked for, a line of `fleet/processing/timed_text.py` with its
segments and words. Pieces in one chunk are joined; `sizes` separates them.
"""

CASCADE = Graph(
    name="cascade",
    frontend="fleet.processing.cascade:CascadeFrontend",
    tiny="fleet.models.cascade_tiny:write_tiny_checkpoint",
    media={HEARD: "transcript", TEXT: "text", AUDIO: "audio"},
    stages=(
        Stage(
            name=ASR,
            builder="fleet.stages.cascade.asr:build",
            walks=(DECODE,),
            reads_prompt_audio=True,
            settings=("short_windows", "compute_type"),
            engines=("torch", "ctranslate2"),
            default_sampling={"max_tokens": 224},  # a chat's temperature is not the recogniser's
            checkpoint_folder="asr",
        ),
        language_model("fleet.stages.cascade.lm:build", checkpoint_folder="lm"),
        Stage(
            name=TTS,
            builder="fleet.stages.cascade.tts:build",
            walks=(DECODE,),
            checkpoint_folder="tts",
            checkpoint_files=("voice.json",),
            checkpoint_extras=("*.onnx", "voices/*.bin"),
            shipped={"hibari": "fleet:checkpoints/hibari"},
        ),
    ),
    edges=(
        Edge(
            name=TRANSCRIPT,
            source=ASR,
            target=LM,
            tensors=TRANSCRIPT_TENSORS,
            credits=1024,
            only_with="audio",
        ),
        Edge(name=HEARD, source=ASR, target=CLIENT, tensors=TRANSCRIPT_TENSORS),
        # Answer token ids, the end token included; the gateway turns them into text.
        Edge(name=TEXT, source=LM, target=CLIENT, tensors={"ids": "int32"}, policy=TOKENS),
        # One item per answer token: its id [1], and the UTF-8 bytes of the text that became certain
        # with it, without control tokens and stop strings; often none.
        Edge(
            name=SAID,
            source=LM,
            target=TTS,
            tensors={"ids": "int32", "text": "uint8"},
            credits=1024,  # as many as a usual answer has tokens: text does not wait for its speech
            replaced_by="speech_text",
        ),
        # PCM16 mono samples at 24 kHz in pieces of at most 0.5 s. The words that end in a piece:
        # sample positions in the whole answer [n], and their UTF-8 bytes, each ended by "\0".
        Edge(
            name=AUDIO,
            source=TTS,
            target=CLIENT,
            tensors={"pcm": "int16", "word_ends": "int32", "words": "uint8"},
        ),
    ),
)
