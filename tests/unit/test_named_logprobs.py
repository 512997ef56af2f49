"""Log probabilities of the tokens that a request names, beside rows that ask for the most likely
ones.
"""

import pytest
import torch

from fleet.core.chunk import LOGPROBS, TOP_IDS
from fleet.engine.torch.logprobs import RawLogits


@pytest.mark.parametrize("one_by_one", [True, False])
def test_named_tokens_have_their_own_log_probabilities(*, one_by_one: bool) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0], [3.0, 0.0, 1.0, 2.0], [9.0, 0.0, 0.0, 0.0]])
    log = logits.log_softmax(-1)
    raw = RawLogits(logits, {0: 0, 1: 2}, named={0: (3, 0, 2)}, one_by_one=one_by_one)
    made = raw.of_tokens([2, 1, 0])
    assert made.keys() == {0, 1}
    assert made[0][TOP_IDS].tolist() == [[3, 0, 2]] and made[1][TOP_IDS].tolist() == [[0, 3]]
    assert made[0][LOGPROBS].tolist() == [log[0, [2, 3, 0, 2]].tolist()]
    assert made[1][LOGPROBS][0].tolist() == pytest.approx(log[1, [1, 0, 3]].tolist())
