"""Processing of prompts and answers: tokenizer, chat template, audio decoding. Never imports torch.

Each model family has a `Frontend` in a file of its own (`qwen3_omni.py`, `text.py`), named by the
graph declaration and used through the protocol in `base.py`.
"""

from fleet.processing.base import (
    AudioPart,
    ChatRequest,
    Detokenizer,
    Frontend,
    GivenAnswer,
    Message,
    PlainPrompt,
    RecognitionOptions,
    Recording,
    TextPart,
    load_frontend,
    open_frontend,
)

__all__ = [
    "AudioPart",
    "ChatRequest",
    "Detokenizer",
    "Frontend",
    "GivenAnswer",
    "RecognitionOptions",
    "Message",
    "PlainPrompt",
    "Recording",
    "TextPart",
    "load_frontend",
    "open_frontend",
]
