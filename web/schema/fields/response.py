"""Field table of `POST /v1/responses`: the rows of a chat with another input. Data only. Source:
openai 3.57 types.
"""

from web.schema.fields.chat import CHAT, CHOICE_SERVED, TOOLS_SERVED
from web.schema.fields.common import CHATS_ALONE, FILES, IMAGES, LABELS
from web.schema.fields.completion import STREAM_OPTIONS
from web.schema.fields.table import (
    Field,
    FieldTable,
    ignored,
    refused,
    refused_by_value,
    served,
    under,
)

FORMER = "the former name of tools and their calls; send tools and tool_choice"
THOUGHTS = "thoughts of an earlier answer are not read; remove them"
HOSTED = "only functions are called here, so no other calls and outputs are read; remove them"
REFERENCES = (
    "items are not stored under their ids; send the items, or previous_response_id for a "
    "whole conversation"
)
LOGPROBS = "this server does not send them; remove it"

_TEXT_ALONE: list[Field] = [
    *refused("image_url detail", IMAGES),
    *refused("file_data file_id file_url filename", FILES),
]
INPUT: list[Field] = [
    *served("type", "message, which may be left out, function_call or function_call_output"),
    *served("role", "user, assistant, system or developer"),
    *served("content content[].type content[].text"),
    *served("content[].input_audio content[].input_audio.data"),
    *served("content[].input_audio.format", "checked; the file's header decides"),
    *under(
        "content[]",
        _TEXT_ALONE,
        refused("refusal", "send it as a part of type output_text"),
        ignored("logprobs", "figures about an earlier answer, beside its text"),
        LABELS,
    ),
    *served("call_id", "names a call; its output counts once"),
    *served("name arguments", "of a call"),
    *served("output output[].type output[].text", "of a call: a text, or parts of type input_text"),
    *under("output[]", _TEXT_ALONE, LABELS, refused("outcome stderr stdout", HOSTED)),
    *refused("output.type output.image_url output.file_id", HOSTED),
    *served("status", "of a call: one that is not completed has no part in the prompt"),
    *ignored("phase", "names the part of an earlier answer"),
    *refused("reasoning summary encrypted_content", THOUGHTS),
    *refused("caller", HOSTED, accepted=({"type": "direct"},)),
    *refused(
        "namespace async input code outputs container_id action actions operation environment "
        "execution fingerprint result results queries reason tools server_label error "
        "approval_request_id approve acknowledged_safety_checks pending_safety_checks "
        "max_output_length background output_format quality revised_prompt size svg_usage text",
        HOSTED,
    ),
    *(row for row in LABELS if row.path != "status"),
]

RESPONSE = FieldTable(
    "POST /v1/responses",
    served("input", "a text, or messages, function calls and their outputs"),
    under("input[]", INPUT),
    served("instructions", "first, as a system message; not kept for the next response"),
    served("previous_response_id", "the conversation that is continued"),
    served("store", "false: the response is not stored, and nothing is trained on it"),
    served("max_output_tokens", "or max_tokens, or both with one value"),
    served("metadata"),
    served("text text.format text.format.type"),
    served("text.format.schema", "the answer keeps it"),
    ignored("text.format.name text.format.description", "names of the schema for people"),
    ignored("text.format.strict", "every answer keeps its schema"),
    refused(
        "text.verbosity",
        "not served; ask for a short or long answer in the text",
        accepted=("medium",),
    ),
    refused_by_value("include", "only names of parts of tools' items and thoughts, which none has"),
    refused_by_value("tools", TOOLS_SERVED),
    refused_by_value("tool_choice", CHOICE_SERVED),
    served("parallel_tool_calls", "false: at most one call"),
    ignored("max_tool_calls", "counts the calls of hosted tools, of which there are none"),
    refused("functions function_call", FORMER),
    served("stream_options"),
    ignored("stream_options.include_usage", "the last event always has the usage"),
    STREAM_OPTIONS,
    refused("background", "a response is computed while its client waits", accepted=(False,)),
    refused("background_options", "a response is computed while its client waits"),
    refused("reasoning", "thinking cannot be turned on, off or down here; remove it"),
    refused("truncation", "a prompt is never cut; send a shorter one", accepted=("disabled", None)),
    refused("context_management", "a conversation is never compacted; begin a new one"),
    refused("conversation", "continue a conversation by previous_response_id"),
    refused("prompt", "prompt templates are not stored here; send their text"),
    refused("access_programs", "there are none here; remove it"),
    refused("messages", "send them as input"),
    refused("modalities", "a response has text only", accepted=(["text"],)),
    refused("audio", "a response has text only; spoken answers are at /v1/chat/completions"),
    refused("max_completion_tokens", "not served under this name; use max_output_tokens"),
    CHAT.without(
        "messages modalities audio max_completion_tokens max_output_tokens stream_options tools "
        "functions parallel_tool_calls tool_choice function_call metadata store reasoning "
        "truncation prompt text n logprobs top_logprobs continue_final_message "
        "add_generation_prompt"
    ),
    CHATS_ALONE,
)
