"""The embedding, body and output head of a `transformers` causal model, each called by itself
through the model's own code.

Knows no requests. Legend: N positions, H hidden size, V vocabulary, T width of the features of a
draft head.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from fleet.engine.torch.layout import Layout
from fleet.engine.torch.rows import side_by_side
from fleet.models.causal_lm.paged import LAYOUT, BodyStub, run_layers
from fleet.models.causal_lm.rope import Rotaries, read_scaling


class Parts:
    """A causal model of `transformers`, split into embedding, body (the layers and the final norm)
    and output head. Raises: AttributeError if the model names its parts differently.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._name = model, model.base_model_prefix
        self._body = cast(nn.Module, getattr(model, self._name))
        self._embedding, self._stub = model.get_input_embeddings(), BodyStub()
        setattr(model, self._name, self._stub)
        self._entering: dict[int, Tensor | None] = {}
        self._rotaries = Rotaries(self._body, read_scaling(model.config.get_text_config()))

    def read_features(self, layers: Sequence[int]) -> None:
        """Keep the hidden states that enter the layers with these numbers in each later call of
        `body`, for `features`. Raises: ValueError if the model has no list of its layers.
        """
        num_layers = int(self._model.config.num_hidden_layers)
        lists = [
            part
            for part in self._body.modules()
            if isinstance(part, nn.ModuleList) and len(part) == num_layers
        ]
        if not lists:
            raise ValueError(f"it keeps its {num_layers} layers in no list")
        self._entering = dict.fromkeys(layers)
        for number in layers:
            lists[0][number].register_forward_pre_hook(
                partial(self._note_entering, number), with_kwargs=True
            )

    def _note_entering(
        self, number: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._entering[number] = (args[0] if args else kwargs["hidden_states"])[0]

    def features(self) -> Tensor | None:
        """Return the hidden states that entered the layers of `read_features` in the last call of
        `body`, concatenated: [N, T]; None if there are no such layers.
        """
        return side_by_side(self._entering)

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return the embeddings of token ids: [N] -> [N, H]."""
        return self._embedding(ids_N)

    def body(self, rows_NH: Tensor, layout: Layout) -> Tensor:
        """Run all layers and the final norm: embeddings [N, H] -> hidden states [N, H]."""
        return run_layers(self._body, self._rotaries, rows_NH, layout)

    def head(self, last_NH: Tensor) -> Tensor:
        """Return the logits of final hidden states: [N, H] -> [N, V]."""
        return self._model(inputs_embeds=last_NH[None], use_cache=False).logits[0]

    def whole(self, ids_N: Tensor, layout: Layout) -> Tensor:
        """Return the logits [N, V] of a text from its beginning, computed by the whole model with
        its own embedding and positions, for comparison with the parts.
        """
        setattr(self._model, self._name, self._body)
        try:
            return self._model(input_ids=ids_N[None], use_cache=False, **{LAYOUT: layout}).logits[0]
        finally:
            setattr(self._model, self._name, self._stub)
