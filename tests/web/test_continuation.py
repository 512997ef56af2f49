"""Chats whose last message the answer continues: their prompt, their answer, and refusals."""

from typing import Any

import pytest

from fleet.processing.tokenizer import load_tokenizer
from tests.web.conftest import HELLO, Loaded, ServedGateway, chat

BEGUN = [*HELLO, {"role": "assistant", "content": "The colour of the"}]
ASKED = {"continue_final_message": True, "add_generation_prompt": False}


def test_prompt_ends_with_the_last_message_and_the_answer_is_its_rest(
    gateway: ServedGateway, loaded: Loaded
) -> None:
    tokenizer = load_tokenizer(loaded.checkpoint)
    gateway.client.script.text = " sky is blue"
    for content in ("The colour of the", [{"type": "text", "text": "The colour of the"}]):
        message = {"role": "assistant", "content": content}
        answer = chat(gateway, messages=[*HELLO, message], **ASKED)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == " sky is blue"
        spec, _ = gateway.client.submitted[-1]
        shown = tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)
        assert shown.endswith("assistant\nThe colour of the") and spec.continues
    whole = chat(gateway, messages=BEGUN)
    spec, _ = gateway.client.submitted[-1]
    shown = tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)
    assert whole.status_code == 200 and shown.endswith("assistant\n") and not spec.continues


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({**ASKED, "add_generation_prompt": True}, "continue_final_message"),
        ({**ASKED, "messages": HELLO}, "continue_final_message"),
        ({**ASKED, "modalities": ["text", "audio"]}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({**ASKED, "echo": True}, "echo"),
    ],
)
def test_chat_that_cannot_be_continued_is_refused_by_name(
    gateway: ServedGateway, fields: dict[str, Any], param: str
) -> None:
    answer = chat(gateway, **{"messages": BEGUN, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and not gateway.client.submitted
