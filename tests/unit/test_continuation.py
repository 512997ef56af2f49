"""Prompts whose last message the answer continues, and the text of such answers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import BadInput
from fleet.core.ids import EdgeName, RequestId
from fleet.core.request import RequestSpec
from fleet.processing.continuation import Continuation
from fleet.processing.detokenize import IncrementalDetokenizer
from fleet.processing.template import ChatTemplate
from fleet.stages.stop_strings import StopDetector
from tests.unit.test_processing_text import BYTES, FALLBACK
from tests.web.checkpoint import write_frontend_files

HEAD = "{% for message in messages %}<{{ message.role }}>"
END = "</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "whole": HEAD + "{{ message.content }}" + END,
    "trimmed": HEAD + "{{ message.content | trim }}" + END,
    "trimmed at the end": HEAD + "{{ message.content.rstrip('\n ') }}" + END,
    "blocks": HEAD + "{% for part in message.content %}{{ part.text }}{% endfor %}" + END,
}
TEXTS = ["The answer is", " The answer is ", "Line\n\n", "a <assistant> b</s>", ""]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_frontend_files(tmp_path_factory.mktemp("checkpoint"))


def messages(text: str, *, blocks: bool) -> list[dict[str, object]]:
    texts = (("user", "What is it?"), ("assistant", text))
    return [
        {"role": role, "content": [{"type": "text", "text": content}] if blocks else content}
        for role, content in texts
    ]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_ends_where_it_does_in_transformers(checkpoint: Path, name: str, text: str) -> None:
    from transformers import AutoTokenizer

    given = messages(text, blocks=name == "blocks")
    wanted = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(
        given, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    continuation = Continuation()
    rendered = ChatTemplate(TEMPLATES[name], {}).render(
        continuation.marked(given), opens_answer=False
    )
    assert continuation.cut(rendered) == wanted


def test_message_that_the_template_changes_or_that_is_no_text_is_refused() -> None:
    source = HEAD + "{{ message.content | upper }}" + END
    continuation = Continuation()
    with pytest.raises(BadInput, match="changes the last message"):
        continuation.cut(
            ChatTemplate(source, {}).render(
                continuation.marked(messages("Lower", blocks=False)), opens_answer=False
            )
        )
    with pytest.raises(BadInput, match="does not end with text"):
        Continuation().marked([{"role": "assistant", "content": [{"type": "audio"}]}])


@given(st.text("aé☕ ", min_size=1, max_size=12), st.text("aé☕ ", max_size=12))
def test_text_after_ids_is_the_rest_of_the_whole_text(before: str, after: str) -> None:
    for tokenizer in (BYTES, FALLBACK):
        spaced = [
            text.replace(" ", "▁") if tokenizer is FALLBACK else text for text in (before, after)
        ]
        first, second = (tokenizer.encode(text).ids for text in spaced)
        detokenizer = IncrementalDetokenizer(tokenizer)
        detokenizer.begin_after(first)
        made = detokenizer.add(second) + detokenizer.finish()
        assert made == tokenizer.decode([*first, *second])[len(tokenizer.decode(first)) :]
        if before.strip():
            assert made == after


def test_stop_string_with_a_leading_space_is_found_in_a_continued_text() -> None:
    hello = FALLBACK.token_to_id("▁hello")
    assert hello is not None
    assert not StopDetector([" hello"], lambda: FALLBACK).add(hello)
    assert StopDetector([" hello"], lambda: FALLBACK, FALLBACK.encode("a").ids).add(hello)


def test_last_ids_of_a_prompt_precede_only_an_answer_that_continues_it() -> None:
    spec = RequestSpec(
        id=RequestId("r"),
        graph="text",
        prompt_ids=(1, 2, -1, *range(10, 16)),
        outputs=(EdgeName("text"),),
    )
    assert spec.continued_ids == ()
    continuing = RequestSpec(
        id=spec.id, graph="text", prompt_ids=spec.prompt_ids, outputs=spec.outputs, continues=True
    )
    assert continuing.continued_ids == (2, *range(10, 16))
