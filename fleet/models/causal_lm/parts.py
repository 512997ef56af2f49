"""The parts of a causal model of `transformers` that a program runs one by one, by the model's own code.

Knows no requests. Legend: N rows, H hidden size, V vocabulary.
"""

from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from fleet.engine.torch.layout import Layout
from fleet.models.causal_lm.paged import LAYOUT, BodyStub


class Parts:
    """The embedding, the layers and the head. Raises: AttributeError if a model names its parts differently."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._name = model, model.base_model_prefix
        self._body = cast(nn.Module, getattr(model, self._name))
        self._embedding, self._stub = model.get_input_embeddings(), BodyStub()
        setattr(model, self._name, self._stub)

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return embeddings [N, H]."""
        return self._embedding(ids_N)

    def body(self, rows_NH: Tensor, layout: Layout) -> Tensor:
        """Return final hidden rows [N, H]."""
        positions = layout.positions[None]
        done = self._body(inputs_embeds=rows_NH[None], position_ids=positions, use_cache=False, **{LAYOUT: layout})
        return done.last_hidden_state[0]

    def head(self, last_NH: Tensor) -> Tensor:
        """Return logits [N, V]."""
        return self._model(inputs_embeds=last_NH[None], use_cache=False).logits[0]

    def whole(self, ids_N: Tensor, layout: Layout) -> Tensor:
        """Return logits [N, V] of one text from its beginning, with the model's own embedding and positions."""
        setattr(self._model, self._name, self._body)
        try:
            return self._model(input_ids=ids_N[None], use_cache=False, **{LAYOUT: layout}).logits[0]
        finally:
            setattr(self._model, self._name, self._stub)
