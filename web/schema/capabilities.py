"""What a model can do, as its entry in the list of models describes it. Data only."""

import msgspec


class AudioIntake(msgspec.Struct, frozen=True, kw_only=True):
    """Audio that the model accepts. `formats`: names of file formats. `languages`: codes, such as
    `en`; empty if the checkpoint names none. `max_audio_s`, `max_transcription_s`: longest audio of
    a request, and of a transcription, in seconds.
    """

    formats: list[str]
    languages: list[str]
    max_audio_s: float
    max_transcription_s: float


class SpeechOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Speech of the model's answers. `voices`: names, the default one first. `formats`,
    `streamed_formats`: formats of whole and streamed chat answers; `file_formats`: formats of
    `/v1/audio/speech`, whose texts have at most `max_chars` characters.
    """

    voices: list[str]
    formats: list[str]
    streamed_formats: list[str]
    file_formats: list[str]
    sample_rate_hz: int
    max_chars: int


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Modalities, which are `text` and `audio`, features and limits of a model.

    `structured_output`: True if answers keep a given schema; `tools`: True if answers can call
    tools. `hearing`, `speech`: None if the model accepts or produces no audio.
    """

    input_modalities: list[str]
    output_modalities: list[str]
    structured_output: bool
    tools: bool
    max_prompt_tokens: int
    max_answer_tokens: int
    max_messages: int
    hearing: AudioIntake | None
    speech: SpeechOutput | None
