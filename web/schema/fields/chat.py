"""Field table of `POST /v1/chat/completions`. Data only. Source: openai 3.57 types, and the clients
and servers named in the rows.
"""

from web.schema.fields.common import (
    CONSTRAINTS,
    CONTENT,
    FILES,
    HARMLESS,
    IMAGES,
    LABELS,
    TEMPLATE,
    VIDEO,
)
from web.schema.fields.table import (
    Field,
    FieldTable,
    ignored,
    refused,
    refused_by_value,
    served,
    under,
)

NO_TOOLS = "this model calls no tools"
NEW_CHAT = "start a new chat with this model, or send the result as text in a user message"
TOOLS_IGNORED = (
    f"{NO_TOOLS}, and an answer without a call is one of those that optional tools allow"
)
TOOLS_SERVED = (
    "functions are accepted, with name, description, parameters and strict; a model that calls "
    "none ignores all tools, with a warning"
)
CHOICE_SERVED = "a model that calls no functions accepts auto and none, and refuses a required call"
FORMER = "the former name of tools and their calls; send tools, tool_choice and tool_calls"

_MEDIA: list[Field] = [
    *refused("image images image_url source", IMAGES),
    *refused("video videos video_url", VIDEO),
    *refused("file files attachments", FILES),
]

_MESSAGE: list[Field] = [
    *served("role", "system, developer, user, assistant or tool"),
    *served("name", "given to the checkpoint's chat template, which may write it"),
    *served("content content[].type content[].text"),
    *served("content[].input_audio content[].input_audio.data"),
    *served("content[].input_audio.format", "checked; the file's header decides"),
    *served("content[].audio_url content[].audio_url.url", "data: URLs only"),
    *under("content[]", _MEDIA, LABELS, refused("refusal", "send it as a part of type text")),
    *served("audio audio.id", "an earlier spoken answer to the same API key"),
    *served("tool_calls", "a model that calls no functions refuses it"),
    *served("tool_calls[].id tool_calls[].type tool_calls[].function"),
    *served("tool_calls[].function.name tool_calls[].function.arguments"),
    *refused("tool_calls[].custom", "only functions are called here; send it as text"),
    *ignored("tool_calls[].index", "the calls are in the order of the list"),
    *served("tool_call_id", "the call whose result a message with the role tool has"),
    *refused("function_call", FORMER),
    *refused("refusal", "send it as content"),
    *refused(
        "reasoning_content reasoning thinking",
        "thoughts of an earlier answer are not read; remove them",
    ),
    *_MEDIA,
    *LABELS,
]

CHAT = FieldTable(
    "POST /v1/chat/completions",
    served(
        "model messages modalities audio audio.format audio.voice audio.voice.id stream "
        "stream_options"
    ),
    under("messages[]", _MESSAGE),
    served(
        "stream_options.include_usage stream_options.include_event_ids "
        "stream_options.include_wav_headers"
    ),
    ignored(
        "stream_options.include_obfuscation",
        "pads events against eavesdroppers; the text is the same",
    ),
    ignored(
        "stream_options.continuous_usage_stats",
        "the usage comes once, at the end; the text is the same",
    ),
    served("temperature top_p top_k repetition_penalty frequency_penalty presence_penalty seed"),
    served("max_tokens max_completion_tokens", "one of them, or both with one value"),
    served("min_tokens ignore_eos stop"),
    served("min_p", "as in `transformers`: the last cut, after top_p"),
    served("logit_bias", "token ids, -100 to 100, at most 300; added before the penalties"),
    served("allowed_token_ids", "at most 1024; an end token is sampled only if it is listed"),
    served("bad_words", "at most 256, with and without a space before them, as vLLM reads them"),
    served("stop_token_ids", "at most 256; the answer ends before the token's text"),
    served("logprobs top_logprobs", "of the model, before all settings; 0 to 20; not with speech"),
    refused_by_value("n", "1 to 4 texts of an answer, or 1 that is spoken or has event ids"),
    served("continue_final_message", "the answer is the rest of the assistant's last message"),
    refused_by_value("add_generation_prompt", "false with continue_final_message, else true"),
    served("prompt_cache_key", "names the conversation whose computed prefix is used"),
    served("store", "false: nothing is trained on the answer"),
    served("fleet", "sampling of single stages, as far as they sample; a seed for each"),
    refused_by_value("tools", TOOLS_SERVED),
    refused_by_value("tool_choice", CHOICE_SERVED),
    served("parallel_tool_calls", "false: at most one call"),
    refused("functions", FORMER),
    refused("function_call", FORMER, accepted=("auto", "none", "", {}, [])),
    served("response_format response_format.type response_format.json_schema"),
    under(
        "response_format.json_schema",
        served("schema", "the answer keeps it"),
        ignored("name description", "names of the schema for people"),
        ignored("strict", "every answer keeps its schema"),
    ),
    served("guided_json guided_regex guided_choice guided_grammar", "vLLM's earlier names"),
    served("json_schema regex ebnf", "SGLang's names"),
    under(
        "structured_outputs",
        served("json regex choice grammar json_object"),
        ignored(
            "disable_fallback disable_any_whitespace",
            "about the library that keeps the rule; JSON has no blanks but those between its parts",
        ),
    ),
    served("structured_outputs", "vLLM's rules"),
    refused(
        "web_search_options",
        "this model searches nothing; turn web search off in the client",
        accepted=(),
    ),
    refused("moderation", "nothing is moderated here; turn it off in the client", accepted=({},)),
    refused(
        "verbosity", "not served; ask for a short or long answer in the text", accepted=("medium",)
    ),
    refused("features", "this server has none of them; turn them off in the client"),
    ignored(
        "prediction", "a guess at the answer's text, which only saves time; the answer is the same"
    ),
    ignored(
        "usage",
        "the usage is part of every whole answer, and of streams with stream_options.include_usage",
    ),
    ignored("use_audio_in_video", "about the audio of videos, which are refused"),
    ignored("background_tasks model_item", "for Open WebUI's own server; no part of the prompt"),
    HARMLESS,
    CONSTRAINTS,
    TEMPLATE,
    CONTENT,
)
