"""Rows of field tables that several routes share: fields that change no answer, and fields of other
servers that would change it. Data only.
"""

from web.schema.fields.table import Field, ignored, refused

IMAGES = "this model cannot read images; remove them from the chat, or choose a model that can"
VIDEO = "this model cannot read video; remove it from the chat, or choose a model that can"
FILES = (
    "this model cannot read files; remove them from the chat, or paste their text into a message"
)
AUDIO = "a chat takes audio as content parts of type input_audio; voices cannot be cloned"
CLONING = (
    "voices cannot be cloned; remove it, and choose one of the voices that GET "
    "/v1/audio/voices lists"
)
TEXT = "send it as the content of a message, or as the input of a speech"
ONE_FILE = "one file is transcribed per request; send it as the field file"

_BOOKKEEPING = "names or labels the request for the client's own records; no part of the prompt"
_TRANSPORT = (
    "a setting of the client or of a proxy about time limits, retries or the "
    "connection; no part of the prompt"
)
_SCHEDULING = (
    "about the order or the price of requests at other servers; answers do not depend on it"
)
_CACHING = "about how long other servers retain computed prefixes; answers do not depend on it"

HARMLESS: list[Field] = [
    *ignored(
        "user user_id metadata safety_identifier session_id chat_id conversation_id thread_id "
        "request_id trace_id trace "
        "client_reference_id message_id parent_id id tags extra_tracing litellm_call_id "
        "litellm_trace_id litellm_session_id "
        "litellm_metadata langfuse_trace_id run_id rid app http_referer x_title",
        _BOOKKEEPING,
    ),
    *ignored(
        "timeout request_timeout stream_timeout num_retries max_retries extra_headers "
        "drop_params no_log",
        _TRANSPORT,
    ),
    *ignored("service_tier priority id_slot slot_id", _SCHEDULING),
    *ignored(
        "prompt_cache_retention prompt_cache_options cache_control cache_prompt cache_salt "
        "keep_alive",
        _CACHING,
    ),
]
"""Top-level fields that clients send and that are ignored in every JSON body, since they change no
answer.
"""

LABELS: list[Field] = [
    *ignored(
        "id object status index created created_at timestamp model usage finish_reason metadata",
        _BOOKKEEPING,
    ),
    *ignored("annotations citations", "references of an earlier answer, beside its text"),
    *ignored("cache_control prompt_cache_breakpoint", _CACHING),
]
"""Fields of a message or of a part that clients send back with an earlier answer."""

_DECODING = "not served; clear it in the client's settings of the model"
_FREE_TEXT = "this route answers in free text only; turn JSON mode or structured output off"
_ONLY_CHATS = "only chat completions have it; clear it in the client's settings of the model"
CHATS_ALONE: list[Field] = [
    *refused("top_logprobs", _ONLY_CHATS, accepted=(False, 0)),
    *refused("logprobs continue_final_message", _ONLY_CHATS, accepted=(False,)),
    *refused("add_generation_prompt", _ONLY_CHATS, accepted=(True,)),
    *refused("n", _ONLY_CHATS, accepted=(1, False)),
]
"""Fields that no route but chats has."""
RULES: list[Field] = [
    *refused("guided_json guided_regex guided_choice guided_grammar", _FREE_TEXT),
    *refused("structured_outputs json_schema regex ebnf", _FREE_TEXT),
    *refused("stop_token_ids bad_words allowed_token_ids", _ONLY_CHATS),
    *refused("logit_bias", _ONLY_CHATS, accepted=({}, [], "")),
    *refused("min_p", _ONLY_CHATS, accepted=(False, 0)),
    *CHATS_ALONE,
]
"""Fields of chats that set a rule for an answer or its tokens, on routes that have none of them."""
CONSTRAINTS: list[Field] = [
    *ignored("guided_decoding_backend", "the library that keeps the rule; the answer keeps it"),
    *refused(
        "guided_whitespace_pattern structural_tag json_object grammar format response_schema",
        "not served under this name; set the rule for the answer in response_format",
    ),
    *refused(
        "bad_words_ids banned_strings banned_tokens custom_token_bans logits_bias "
        "logits_processors stop_regex stopping_strings stop_sequences stop_sequence",
        "not served under this name; use stop, bad_words or logit_bias in a chat",
    ),
    *refused(
        "max_new_tokens max_length num_predict n_predict max_output_tokens max_tokens_to_sample "
        "min_new_tokens min_length",
        "not served under this name; use max_tokens or min_tokens",
    ),
    *refused(
        "repeat_penalty rep_pen",
        "not served under this name; use repetition_penalty",
        accepted=(1,),
    ),
    *refused("length_penalty encoder_repetition_penalty", _DECODING, accepted=(1,)),
    *refused(
        "typical_p typical tfs tfs_z epsilon_cutoff_scale smoothing_curve", _DECODING, accepted=(1,)
    ),
    *refused(
        "top_a top_n_sigma mirostat mirostat_mode xtc_probability dry_multiplier "
        "dynatemp_range smoothing_factor "
        "no_repeat_ngram_size eta_cutoff epsilon_cutoff penalty_alpha",
        _DECODING,
        accepted=(False, 0),
    ),
    *refused(
        "mirostat_tau mirostat_eta xtc_threshold dry_base dry_allowed_length dry_penalty_last_n "
        "dry_sequence_breakers "
        "dynatemp_exponent repeat_last_n repetition_penalty_range samplers sampler_order "
        "sampler_priority temperature_last",
        _DECODING,
    ),
    *refused("random_seed sampler_seed", "not served under this name; use seed"),
    *refused(
        "best_of num_beams beam_width num_return_sequences",
        "no answer is chosen from several; ask for several with n",
        accepted=(1, False),
    ),
    *refused(
        "use_beam_search", "answers are sampled, or greedy with temperature 0", accepted=(False,)
    ),
    *refused("do_sample", "use temperature: 0 for greedy answers", accepted=(True,)),
    *refused(
        "prompt_logprobs return_logprob return_token_ids return_tokens_as_token_ids",
        "this server does not send them; turn them off in the client",
        accepted=(False,),
    ),
    *refused("n_probs", "not served under this name; use top_logprobs", accepted=(0,)),
    *refused("echo", "an answer does not repeat its prompt", accepted=(False,)),
    *refused("suffix", "nothing is inserted before a text; put the text into the prompt"),
    *refused(
        "include_stop_str_in_output no_stop_trim",
        "an answer ends before its stop string",
        accepted=(False,),
    ),
    *refused(
        "skip_special_tokens spaces_between_special_tokens trim_stop",
        "not served",
        accepted=(True,),
    ),
]
"""Fields of other servers that constrain, force or end an answer. Refused, except for neutral
values.
"""

TEMPLATE: list[Field] = [
    *refused(
        "add_special_tokens", "the chat template alone sets special tokens", accepted=(False,)
    ),
    *refused(
        "chat_template chat_template_kwargs",
        "the checkpoint's own template is used, without arguments; remove it",
        accepted=({},),
    ),
    *refused("documents", FILES),
    *refused(
        "reasoning_effort reasoning thinking enable_thinking thinking_budget think "
        "reasoning_format include_reasoning "
        "reasoning_budget separate_reasoning",
        "thinking cannot be turned on, off or down here; clear it in the client's settings of "
        "the model",
        accepted=(),
    ),
    *refused(
        "truncate_prompt_tokens truncation transforms", "a prompt is never cut; send a shorter one"
    ),
]
"""Fields of other servers that change how the prompt is built."""

CONTENT: list[Field] = [
    *refused("image images image_url image_urls input_image input_images photos pictures", IMAGES),
    *refused("video videos video_url video_urls input_video frames", VIDEO),
    *refused("file files file_ids file_url attachment attachments document media medias", FILES),
    *refused("audios audio_url audio_urls audio_data input_audio sound", AUDIO),
    *refused(
        "ref_audio ref_text refAudio reference_audio reference_text reference_id "
        "reference_voice references clone_voice "
        "voice_clone audio_prompt voice_prompt prompt_text prompt_audio prompt_embeds "
        "speaker_embedding speaker_wav "
        "voice_sample x_vector_only_mode",
        CLONING,
    ),
    *refused(
        "context contents history inputs input_ids prompt prompts prompt_ids prompt_token_ids "
        "system system_prompt text ssml",
        TEXT,
    ),
]
"""Fields with content that no route reads. Refused, since without the content the answer would be
to another question.
"""
