"""Greedy answers of a causal language model by `transformers` in float32, with the margin between
the two best logits of each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracle.oracle import from_pretrained

TIE = 1e-4
"""Relative difference below which rounding may swap two logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceText:
    """A greedy answer. `prefixes`: text of the answer after each token. `margins`: difference
    between the two highest logits of each token.
    """

    prefixes: Sequence[str]
    margins: Sequence[float]

    @property
    def num_tokens(self) -> int:
        return len(self.prefixes)

    def divergence(self, text: str, num_tokens: int) -> float | None:
        """Return the margin of the first token in which `text` differs from this answer; None if
        they are equal.
        """
        if (text, num_tokens) == (self.prefixes[-1], self.num_tokens):
            return None
        first = next(
            (place for place, prefix in enumerate(self.prefixes) if not text.startswith(prefix)),
            self.num_tokens - 1,
        )
        return self.margins[first]


class ReferenceModel:
    """A checkpoint folder loaded by `transformers`, which answers greedily."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = from_pretrained("AutoTokenizer", folder)
        self._model = from_pretrained("AutoModelForCausalLM", folder, dtype=torch.float32).eval()

    def num_tokens(self, prompt: str) -> int:
        return int(self._encode(prompt)["input_ids"].shape[1])

    def answer(
        self, prompt: str, max_tokens: int, *, penalty: float = 0.0, ignore_eos: bool = False
    ) -> ReferenceText:
        """Answer one prompt greedily. `penalty`: value of both the frequency and the presence
        penalty.
        """
        encoded = self._encode(prompt)
        num_prompt = encoded["input_ids"].shape[1]
        made = self._model.generate(
            **encoded,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens if ignore_eos else 1,
            do_sample=False,
            logits_processor=[_Penalties(num_prompt, penalty)],
            output_scores=True,
            return_dict_in_generate=True,
        )
        ids = made.sequences[0, num_prompt:].tolist()
        top_T2 = torch.stack(made.scores)[:, 0].topk(2).values
        return ReferenceText(
            prefixes=[
                self._tokenizer.decode(ids[: end + 1], skip_special_tokens=True)
                for end in range(len(ids))
            ],
            margins=((top_T2[:, 0] - top_T2[:, 1]) / top_T2[:, 0].abs()).tolist(),
        )

    def _encode(self, prompt: str) -> Any:
        chat = [{"role": "user", "content": prompt}]
        return self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Logits processor that subtracts OpenAI's frequency and presence penalties, both of size
    `penalty`, for the tokens after the prompt.
    """

    num_prompt: int
    penalty: float

    def __call__(self, ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        drawn, count = ids_BT[0, self.num_prompt :].unique(return_counts=True)
        penalized_BV = logits_BV.clone()
        penalized_BV[0, drawn] -= self.penalty * (count + 1)
        return penalized_BV
