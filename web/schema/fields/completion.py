"""Field table of `POST /v1/completions`: the rows of a chat without its messages and media. Data
only.
"""

from web.schema.fields.chat import CHAT
from web.schema.fields.common import CHATS_ALONE
from web.schema.fields.table import FieldTable, ignored, refused, refused_by_value, served

EVENT_IDS = "only the stream of a chat can be resumed"

STREAM_OPTIONS = [
    *refused_by_value("stream_options.include_event_ids", EVENT_IDS),
    *ignored("stream_options.include_wav_headers", "nothing is spoken"),
    *ignored(
        "stream_options.include_obfuscation",
        "pads events against eavesdroppers; the text is the same",
    ),
    *ignored(
        "stream_options.continuous_usage_stats",
        "the usage comes once, at the end; the text is the same",
    ),
]
"""Rows of options for the stream of an answer that has only text."""

COMPLETION = FieldTable(
    "POST /v1/completions",
    served("prompt", "a text, token ids, or up to four of either; no chat template"),
    CHAT.without(
        "messages modalities audio max_completion_tokens stream_options tools functions "
        "parallel_tool_calls tool_choice function_call prompt prompt_token_ids add_special_tokens "
        "n logprobs top_logprobs continue_final_message add_generation_prompt"
    ),
    CHATS_ALONE,
    served("stream_options stream_options.include_usage"),
    STREAM_OPTIONS,
    refused("messages", "send a chat to /v1/chat/completions"),
    refused("modalities", "a completion has text only", accepted=(["text"],)),
    ignored("audio", "nothing is spoken"),
    refused("max_completion_tokens", "not served under this name; use max_tokens"),
    refused("prompt_token_ids", "send them as prompt"),
    refused(
        "add_special_tokens", "a text gets the tokenizer's own special tokens", accepted=(True,)
    ),
    refused(
        "tools functions tool_choice function_call parallel_tool_calls",
        "a completion calls no tools; send a chat to /v1/chat/completions",
        accepted=([], "none", "auto", True, False),
    ),
)
