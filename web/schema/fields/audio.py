"""Field tables of the audio routes. Data only. Source: openai 3.57 types; vLLM, vllm-omni,
Kokoro-FastAPI, speaches and LiveKit.
"""

from dataclasses import replace

from web.schema.fields.common import CONSTRAINTS, CONTENT, HARMLESS, ONE_FILE, RULES, TEMPLATE
from web.schema.fields.table import FieldTable, ignored, refused, refused_by_value, served

WORD_TIMES = (
    "true: the events with audio have the times of its words; models whose voice does not know "
    "them refuse it"
)
_SPEECH = [
    *served("voice voice.id response_format speed temperature seed fleet"),
    *refused(
        "timestamp_granularities return_timestamps",
        "not served under this name; send word_timestamps true",
    ),
    *refused(
        "instructions", "this model takes no directions for its voice; clear them in the client"
    ),
    *refused(
        "language lang lang_code",
        "the text alone decides the language; clear it in the client",
        accepted=("auto", "Auto"),
    ),
    *refused("task_type", "there is one kind of speech; remove it", accepted=("CustomVoice",)),
    *refused("sample_rate sampling_rate", "speech has 24000 Hz", accepted=(24_000,)),
    *refused(
        "pitch volume volume_multiplier emotion style",
        "not served; clear it in the client",
        accepted=(1, 0),
    ),
    *HARMLESS,
    *RULES,
    *CONSTRAINTS,
    *TEMPLATE,
    *CONTENT,
]
"""Fields of a speech, whole or streamed."""

SPEECH = FieldTable(
    "POST /v1/audio/speech",
    served("model input stream_format"),
    refused_by_value("word_timestamps", f"{WORD_TIMES}; with stream_format sse"),
    ignored("stream", "the file is always sent while it is generated"),
    _SPEECH,
)

_TYPE = served("type")
SPEECH_EVENTS: dict[str, FieldTable] = {
    kind: FieldTable(f"WS /v1/audio/speech/stream: {kind}", _TYPE, rows)
    for kind, rows in {
        "session.config": [
            *served("model", "a name under which this server answers; may be absent"),
            *served("stream_audio"),
            *refused_by_value("word_timestamps", f"{WORD_TIMES}; with stream_audio and pcm"),
            *refused(
                "split_granularity",
                "a text is spoken clause by clause; remove it",
                accepted=("clause",),
            ),
            *ignored(
                "initial_codec_chunk_frames", "about the pieces in which other servers send speech"
            ),
            *refused("input", "send the text in input.text", accepted=("",)),
            *_SPEECH,
        ],
        "input.text": served("text"),
        "input.done": [],
        "session.close": [],
    }.items()
}
"""Field table of each event that a client of the socket sends. Source: vllm-omni."""

HINTS = "this model takes no hints about a recording; clear it in the client"
PROMPT_RULE = (
    "text before the recording, for names and spellings; models without a recogniser of their own "
    "refuse it"
)

TRANSCRIPTION = FieldTable(
    "POST /v1/audio/transcriptions",
    served("file model response_format temperature stream"),
    served("language", "one of the checkpoint's languages; by default the model detects it"),
    served("languages", "one language, as in language; several are refused"),
    refused_by_value(
        "timestamp_granularities",
        "segment and word with verbose_json; other formats have no such field; models without a "
        "recogniser of their own refuse word",
    ),
    refused_by_value("prompt", PROMPT_RULE),
    refused("keywords hotwords initial_prompt", HINTS),
    refused(
        "known_speaker_names known_speaker_references diarize diarization",
        "speakers are not distinguished; clear it",
    ),
    refused("include", "logprobs are not sent; remove it"),
    refused("chunking_strategy", "long recordings are divided at pauses by themselves; remove it"),
    refused(
        "vad_filter word_timestamps", "not served; turn it off in the client", accepted=(False,)
    ),
    refused(
        "task to_language", "speech is transcribed, never translated", accepted=("transcribe",)
    ),
    ignored(
        "stream_include_usage stream_continuous_usage_stats",
        "the usage comes once, at the end; the text is the same",
    ),
    HARMLESS,
    RULES,
    CONSTRAINTS,
    TEMPLATE,
    [replace(row, reason=ONE_FILE) for row in CONTENT if row.path not in ("file", "prompt")],
    refused("messages", ONE_FILE),
)
