"""Prompts that no chat template renders, in every frontend: the tokenizer's own special tokens,
control tokens, and limits.
"""

import shutil
from pathlib import Path

import pytest
from tokenizers import processors

from fleet.config.schema import FleetConfig, Limits
from fleet.core.errors import BadInput
from fleet.core.ids import EdgeName, RequestId
from fleet.processing import ChatRequest, Frontend, PlainPrompt, TextPart, load_frontend
from fleet.processing.tokenizer import load_tokenizer
from tests.web.checkpoint import write_frontend_files
from tests.web.conftest import load_cascade

LIMITS = Limits(max_prompt_tokens=20)
TURN = "<|im_start|>user\nhello<|im_end|>\n"


def with_first_token(checkpoint: Path, folder: Path, token: str) -> Path:
    """Copy a checkpoint, whose tokenizer then begins each text with `token`, as most models'
    tokenizers do.
    """
    shutil.copytree(checkpoint, folder)
    tokenizer = load_tokenizer(folder)
    first = (token, tokenizer.token_to_id(token))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[first]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=["text", "qwen3_omni", "cascade"])
def frontend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Frontend:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "cascade":
        return load_cascade(folder).frontend
    checkpoint = write_frontend_files(folder / "checkpoint")
    reference = FleetConfig(graph=request.param).graph_declaration().frontend
    return load_frontend(reference, checkpoint, LIMITS)


def prepared(frontend: Frontend, prompt: PlainPrompt) -> list[int]:
    chat = ChatRequest(
        id=RequestId("req-1"),
        graph="any",
        messages=(),
        outputs=(EdgeName("text"),),
        where="prompt",
        plain=prompt,
    )
    spec, blob = frontend.prepare(chat)
    assert blob is None and not spec.audio
    return list(spec.prompt_ids)


def text(value: str) -> TextPart:
    return TextPart(text=value, where="prompt")


def test_text_and_its_ids_are_the_same_prompt_with_control_tokens(frontend: Frontend) -> None:
    ids = prepared(frontend, text(TURN))
    assert prepared(frontend, tuple(ids)) == ids
    assert "user" in frontend.prompt_text(ids) and "hello" in frontend.prompt_text(ids)


def test_text_gets_the_tokenizers_first_token_and_ids_do_not(tmp_path: Path) -> None:
    plain = write_frontend_files(tmp_path / "plain")
    folder = with_first_token(plain, tmp_path / "first", "<|endoftext|>")
    frontend = load_frontend("fleet.processing.text:TextFrontend", folder, LIMITS)
    first = load_tokenizer(folder).token_to_id("<|endoftext|>")
    without = load_frontend("fleet.processing.text:TextFrontend", plain, LIMITS)
    ids = prepared(without, text("hello there"))
    assert prepared(frontend, text("hello there")) == [first, *ids]
    assert prepared(frontend, tuple(ids)) == ids


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        (text(""), "no token"),
        ((), "no token"),
        ((-1,), "from 0 to"),
        ((10**6,), "from 0 to"),
        (text("\ud800"), "surrogate"),
        (text("x" * 300_000), "maximum context length"),
    ],
    ids=["empty text", "no ids", "placeholder", "unknown id", "surrogate", "long"],
)
def test_unusable_prompt_is_refused_by_its_field(
    frontend: Frontend, prompt: PlainPrompt, cause: str
) -> None:
    with pytest.raises(BadInput, match=cause) as refused:
        prepared(frontend, prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("name", ["audio_pad", "audio_start", "image_pad", "vision_end"])
def test_tokens_of_media_are_refused_in_text_and_ids(tmp_path: Path, name: str) -> None:
    checkpoint, token = write_frontend_files(tmp_path), f"<|{name}|>"
    frontend = load_frontend(
        FleetConfig().graph_declaration().frontend, checkpoint, Limits(max_prompt_tokens=20)
    )
    found = load_tokenizer(checkpoint).token_to_id(token)
    assert found is not None
    for prompt in (text(f"say {token}"), (found,)):
        with pytest.raises(BadInput, match="audio, images or video"):
            prepared(frontend, prompt)
