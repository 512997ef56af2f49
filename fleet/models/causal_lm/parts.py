"""A causal model of `transformers` in the parts that a program runs one by one, by the model's own code.

Knows no requests. Legend: N rows, H hidden size, V vocabulary.
"""

from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from fleet.engine.torch.layout import Layout
from fleet.models.causal_lm.paged import LAYOUT, BodyStub


class Parts:
    """The embedding, the layers and the head. Raises: AttributeError where a model names its parts otherwise."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._name = model, model.base_model_prefix
        self._body = cast(nn.Module, getattr(model, self._name))
        self._embedding, self._given = model.get_input_embeddings(), BodyStub()
        setattr(model, self._name, self._given)

    def embed(self, ids_N: Tensor) -> Tensor:
        """[N, H]."""
        return self._embedding(ids_N)

    def body(self, rows_NH: Tensor, layout: Layout) -> Tensor:
        """Final hidden rows [N, H]."""
        positions = layout.positions[None]
        done = self._body(inputs_embeds=rows_NH[None], position_ids=positions, use_cache=False, **{LAYOUT: layout})
        return done.last_hidden_state[0]

    def head(self, last_NH: Tensor) -> Tensor:
        """Logits [N, V]."""
        return self._model(inputs_embeds=last_NH[None], use_cache=False).logits[0]

    def whole(self, ids_N: Tensor, layout: Layout) -> Tensor:
        """Logits [N, V] as the model itself makes them of ids, at positions that it knows: of one text, from its beginning."""
        setattr(self._model, self._name, self._body)
        try:
            return self._model(input_ids=ids_N[None], use_cache=False, **{LAYOUT: layout}).logits[0]
        finally:
            setattr(self._model, self._name, self._given)
