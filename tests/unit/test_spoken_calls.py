"""A function call is never spoken: what the speaking stages get of an answer with calls, and the
same again at a new owner.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fleet.core.ids import DECODE, EdgeName, RequestId
from fleet.core.request import ToolUse
from fleet.engine.base import TOKEN, EngineOutput
from fleet.graphs.cascade import SAID, TEXT
from fleet.models.qwen3_omni.tiny_tokenizer import build_tokenizer
from fleet.processing.detokenize import IncrementalDetokenizer
from fleet.processing.tokenizer import token_ids
from fleet.stages.answer_tokens import AnswerTokens
from fleet.stages.base import EdgeItem
from fleet.stages.spoken_tokens import SpokenTokens
from fleet.stages.stop_strings import StopDetector
from tests.tool_template import call_text
from tests.unit.test_spoken_chat_adapter import adapter_of, folder, produced, said

__all__ = ["folder"]
TOKENIZER = build_tokenizer()
END = TOKENIZER.get_vocab()["<|im_end|>"]
TOOLS = ToolUse(format="hermes", names=("get_weather",))
TALKED = EdgeName("thought")
PREAMBLES = ["Grüße, 你好 👋! One moment.", "", "Is <tool_call> a tag? <tool", "So:\n\n "]


def ids_of(text: str) -> list[int]:
    return [*token_ids(TOKENIZER, text, ""), END]


def talked_items(ids: Sequence[int]) -> list[EdgeItem]:
    """Return the items of the edge to a stage that speaks tokens."""
    answer = AnswerTokens(
        client=TEXT,
        spoken=TALKED,
        stop_detector=StopDetector((), lambda: TOKENIZER),
        speech=SpokenTokens(TOOLS, lambda: TOKENIZER),
    )
    items: list[EdgeItem] = []
    for number, token in enumerate(ids):
        array = np.array([token], np.int32)
        final = number == len(ids) - 1
        output = EngineOutput(
            request_id=RequestId("r"), walk=DECODE, arrays={TOKEN: array}, final=final
        )
        items += answer.items(output, array)
    assert [item.edge for item in items].count(TEXT) == len(ids), "the client gets every token"
    return [item for item in items if item.edge == TALKED]


def talked(ids: Sequence[int]) -> str:
    items = talked_items(ids)
    assert [item.final for item in items] == [False] * (len(items) - 1) + [True]
    tokens = [int(token) for item in items for token in item.arrays.get("ids", ())]
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    return detokenizer.add(tokens) + detokenizer.finish()


@pytest.mark.parametrize("preamble", PREAMBLES)
def test_call_is_not_spoken(folder: Path, preamble: str) -> None:
    ids = ids_of(f"{preamble}{call_text()} and more")
    spoken = preamble.rstrip()
    adapter = adapter_of(folder, num_clips=0, tools=TOOLS)
    adapter.open()
    assert said(produced(adapter, ids)) == spoken
    text = talked(ids)
    assert spoken.startswith(text) and len(spoken) - len(text) < 3, "whole tokens are spoken"


@pytest.mark.parametrize(
    "text", ["No call here.", "<tool_call> <", 'it is <tool_call>{"name": "x"}']
)
def test_text_without_a_call_is_spoken_whole(folder: Path, text: str) -> None:
    ids = ids_of(text)
    adapter = adapter_of(folder, num_clips=0, tools=TOOLS)
    adapter.open()
    assert said(produced(adapter, ids)) == text
    assert talked(ids) == text


def test_new_owner_gives_the_same_spoken_items_at_every_token(folder: Path) -> None:
    """The logs of a lost owner end anywhere; the new one produces every item again."""
    ids = ids_of(f"{PREAMBLES[0]}{call_text()}")
    items = None
    for num_known in range(len(ids)):
        adapter = adapter_of(folder, num_clips=0, tools=TOOLS)
        logged = {(TEXT, DECODE): {"ids": np.array(ids[:num_known], np.int32)}}
        request, _ = adapter.open(logged if num_known else {})
        assert request.history.get(TOKEN, np.empty(0)).tolist() == ids[:num_known]
        again = [(item.edge, item.final, str(item.arrays)) for item in produced(adapter, ids)]
        assert items is None or again == items
        items = again


def test_edges_end_once_with_a_call(folder: Path) -> None:
    adapter = adapter_of(folder, num_clips=0, tools=TOOLS)
    adapter.open()
    items = produced(adapter, ids_of(f"Yes. {call_text()}"))
    for edge in (TEXT, SAID):
        finals = [item.final for item in items if item.edge == edge]
        assert finals == [False] * (len(finals) - 1) + [True]
    assert len([i for i in items if i.edge == SAID]) < len([i for i in items if i.edge == TEXT])
