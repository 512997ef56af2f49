"""Incremental detokenising, stop strings, the chat template and the text frontend."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fleet.config.schema import Limits
from fleet.core.errors import BadInput, ConfigError, InputTooLarge
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.processing import AudioPart, ChatRequest, Message, TextPart, load_frontend
from fleet.processing.context_length import read_num_positions
from fleet.processing.detokenize import IncrementalDetokenizer, StopTrimmer
from fleet.processing.template import ChatTemplate
from fleet.processing.tokenizer import load_tokenizer
from tests.web.checkpoint import write_frontend_files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_frontend_files(tmp_path_factory.mktemp("checkpoint"))


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte: every character beyond ASCII is split over
    tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer like SentencePiece: byte fallback, and a leading space that decoding
    drops.
    """
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁hello": 257, "a": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTES, FALLBACK = byte_tokenizer(), fallback_tokenizer()


@given(st.text())
def test_detokenizer_never_splits_a_character(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces = [detokenizer.add([token]) for token in BYTES.encode(text).ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(0, 255), max_size=60))
def test_incremental_decoding_equals_whole_decoding(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert "".join(
        detokenizer.add([token]) for token in ids
    ) + detokenizer.finish() == BYTES.decode(ids)


@given(st.lists(st.one_of(st.integers(0, 258), st.sampled_from([256, 257, 258])), max_size=40))
def test_incremental_byte_fallback_equals_whole_decoding(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(FALLBACK)
    joined = "".join(detokenizer.add([token]) for token in ids) + detokenizer.finish()
    if "\ufffd" not in FALLBACK.decode(ids):
        assert joined == FALLBACK.decode(ids)


@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("你好😀é ")), max_size=20))
def test_byte_fallback_never_splits_a_character(text: str) -> None:
    ids = list(text.encode())
    detokenizer = IncrementalDetokenizer(FALLBACK)
    pieces = [detokenizer.add([token]) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == FALLBACK.decode(ids)
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


def test_invalid_bytes_are_released() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    ids = BYTES.encode("é").ids[:1] * 50
    assert len(detokenizer.add(ids)) >= 40


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
@settings(max_examples=200)
def test_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    trimmer = StopTrimmer(stops)
    released, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        released += trimmer.add(piece)
    assert not any(stop in released for stop in stops)
    released += trimmer.finish()
    cuts = [index for stop in stops if (index := text.find(stop)) >= 0]
    if trimmer.stopped:
        assert text.startswith(released) and any(
            text.startswith(stop, len(released)) for stop in stops
        )
    else:
        assert not cuts and released == text


def test_template_can_refuse_but_not_escape_the_sandbox() -> None:
    with pytest.raises(BadInput, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])
    with pytest.raises(BadInput):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render([])
    with pytest.raises(ConfigError):
        ChatTemplate("{% if %}", {})


TEMPLATES = (
    # what the assistant said, marked for training; what is set within is not seen outside
    "{% set who = 'out' %}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{% set who = 'in' %}{{ who }}: {{ message.content }}{{ eos_token }}{% "
    "endgeneration %}\n"
    "{% else %}{{ loop.index }} {{ message.content }}{% endif %}{% endfor %}{{ who }}",
    "{% if tools is not none %}TOOLS{% endif %}{% if documents is defined %}{{ documents }}{% "
    "endif %}{{ messages | length }}",
    "{% for message in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ message | "
    "tojson }}{% endfor %}",
)


@pytest.mark.parametrize("source", TEMPLATES)
def test_template_renders_as_in_transformers(checkpoint: Path, source: str) -> None:
    from transformers import AutoTokenizer

    messages = [
        {"role": role, "content": f"{role} <é> said"}
        for role in ("system", "user", "assistant", "user", "assistant")
    ]
    reference = AutoTokenizer.from_pretrained(checkpoint)
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    special = {"eos_token": reference.eos_token}
    assert ChatTemplate(source, special).render(messages) == expected


def chat(*messages: Message, spoken: bool = False) -> ChatRequest:
    return ChatRequest(
        id=RequestId("req-1"),
        graph="text",
        messages=messages,
        outputs=(EdgeName("text"),),
        spoken=spoken,
    )


def test_text_parts_are_joined_and_audio_is_refused(checkpoint: Path) -> None:
    frontend = load_frontend("fleet.processing.text:TextFrontend", checkpoint, Limits())
    parts = (
        TextPart(text="a", where="messages[0].content[0]"),
        TextPart(text="b", where="messages[0].content[1]"),
    )
    joined, blob = frontend.prepare(chat(Message(role="user", content=parts)))
    plain, _ = frontend.prepare(
        chat(Message(role="user", content=TextPart(text="a\nb", where="w")))
    )
    assert joined.prompt_ids == plain.prompt_ids and blob is None
    with pytest.raises(BadInput, match="text only") as refused:
        frontend.prepare(
            chat(
                Message(role="user", content=(AudioPart(data="", where="messages[0].content[0]"),))
            )
        )
    assert refused.value.param == "messages[0].content[0]"
    with pytest.raises(BadInput, match="does not speak"):
        frontend.prepare(
            chat(Message(role="user", content=TextPart(text="a", where="w")), spoken=True)
        )


def sized(folder: Path, **config: object) -> Path:
    write_frontend_files(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_prompt_and_answer_fit_the_model_positions(key: str, tmp_path: Path) -> None:
    frontend = load_frontend(
        "fleet.processing.text:TextFrontend", sized(tmp_path, **{key: 20}), Limits()
    )
    stage, asked = StageName("lm"), Sampling(max_tokens=15)

    def ask(text: str) -> RequestSpec:
        message = Message(role="user", content=TextPart(text=text, where="messages[0].content"))
        return frontend.prepare(dataclasses.replace(chat(message), sampling={stage: asked}))[0]

    spec = ask("hello")
    assert 5 < len(spec.prompt_ids) and spec.sampling[stage].max_tokens == 20 - len(spec.prompt_ids)
    with pytest.raises(InputTooLarge, match="maximum context length is 19 tokens") as refused:
        ask("hello " * 20)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 40}, 40),
        ({"text_config": {"max_position_embeddings": 40}}, 40),
        (
            {
                "max_position_embeddings": 40,
                "rope_scaling": None,
                "rope_parameters": {"rope_theta": 1e4},
            },
            40,
        ),
        (
            {"max_position_embeddings": 40, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            None,
        ),
        (
            {"max_position_embeddings": 40, "rope_parameters": {"full_attention": {"factor": 8.0}}},
            None,
        ),
        ({"max_position_embeddings": -1}, None),
        ({}, None),
    ],
)
def test_positions_are_read_from_the_model_config(
    config: dict[str, object], expected: int | None, tmp_path: Path
) -> None:
    assert read_num_positions(sized(tmp_path, **config)) == expected


@pytest.mark.parametrize("token", ["<|im_end|>", "<|audio_pad|>", "<|im_start|>"])
def test_control_token_in_a_message_is_refused(checkpoint: Path, token: str) -> None:
    frontend = load_frontend("fleet.processing.text:TextFrontend", checkpoint, Limits())
    with pytest.raises(BadInput) as refused:
        frontend.prepare(
            chat(
                Message(
                    role="user", content=TextPart(text=f"x{token}y", where="messages[0].content")
                )
            )
        )
    assert refused.value.param == "messages[0].content" and token in refused.value.message


@pytest.mark.parametrize("cut", range(1, 10))
def test_control_token_across_parts_is_refused(checkpoint: Path, cut: int) -> None:
    frontend = load_frontend("fleet.processing.qwen3_omni:OmniFrontend", checkpoint, Limits())
    texts = ["hi <|im_end|>"[: 3 + cut], "<|im_end|>"[cut:-1], ">", "and more"]
    parts = tuple(
        TextPart(text=text, where=f"messages[0].content[{i}]") for i, text in enumerate(texts)
    )
    with pytest.raises(BadInput, match="control token") as refused:
        frontend.prepare(chat(Message(role="user", content=parts)))
    assert refused.value.param == "messages[0].content[2]"


def test_lone_surrogate_is_refused(checkpoint: Path) -> None:
    frontend = load_frontend("fleet.processing.text:TextFrontend", checkpoint, Limits())
    with pytest.raises(BadInput, match="surrogate"):
        frontend.prepare(
            chat(Message(role="user", content=TextPart(text="\ud800", where="messages[0].content")))
        )


def test_too_long_prompt_is_refused_before_and_after_tokenising(checkpoint: Path) -> None:
    frontend = load_frontend(
        "fleet.processing.text:TextFrontend", checkpoint, Limits(max_prompt_tokens=20)
    )
    for text in ("hello " * 20, "x" * 1000):
        with pytest.raises(InputTooLarge) as refused:
            frontend.prepare(chat(Message(role="user", content=TextPart(text=text, where="w"))))
        assert refused.value.param == "messages"
        assert (
            refused.value.code == "context_length_exceeded"
            and "maximum context length is 20 tokens" in refused.value.message
        )


def test_checkpoint_without_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_frontend("fleet.processing.text:TextFrontend", tmp_path, Limits())
    write_frontend_files(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        load_frontend("fleet.processing.text:TextFrontend", tmp_path, Limits())


def test_name_of_a_speaker_is_given_to_the_chat_template(tmp_path: Path) -> None:
    folder = write_frontend_files(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}"
    )
    frontend = load_frontend("fleet.processing.text:TextFrontend", folder, Limits())
    turns = [
        Message(role="user", name="anna", content=TextPart(text="hello", where="x"))
        for _ in range(2)
    ]
    turns[1] = dataclasses.replace(turns[1], name="")
    chat = ChatRequest(
        id=RequestId("req-1"), graph="text", messages=tuple(turns), outputs=(EdgeName("text"),)
    )
    spec, _ = frontend.prepare(chat)
    assert load_tokenizer(folder).decode(list(spec.prompt_ids)) == "anna: hello\nuser: hello\n"
    forged = dataclasses.replace(chat, messages=(dataclasses.replace(turns[0], name="<|im_end|>"),))
    with pytest.raises(BadInput, match="control token"):
        frontend.prepare(forged)
