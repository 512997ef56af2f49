"""The parts of a causal model of `transformers` that a program runs one by one, by the model's own
code.

Knows no requests. Legend: N rows, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from fleet.engine.torch.layout import Layout
from fleet.engine.torch.rows import side_by_side
from fleet.models.causal_lm.paged import LAYOUT, BodyStub
from fleet.models.causal_lm.rope import Rotaries, read_scaling


class Parts:
    """The embedding, the layers and the head. Raises: AttributeError if a model names its parts
    differently.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._name = model, model.base_model_prefix
        self._body = cast(nn.Module, getattr(model, self._name))
        self._embedding, self._stub = model.get_input_embeddings(), BodyStub()
        setattr(model, self._name, self._stub)
        self._entering: dict[int, Tensor | None] = {}
        self._rotaries = Rotaries(self._body, read_scaling(model.config.get_text_config()))

    def read_features(self, layers: Sequence[int]) -> None:
        """Keep the rows that enter these layers in each later `body`. Raises: ValueError if no list
        of its layers is found.
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
        """Return the rows that entered the layers of `read_features` in the last `body`, side by
        side: [N, T].
        """
        return side_by_side(self._entering)

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return embeddings [N, H]."""
        return self._embedding(ids_N)

    def body(self, rows_NH: Tensor, layout: Layout) -> Tensor:
        """Return final hidden rows [N, H]."""
        positions = layout.positions[None]
        with self._rotaries.scaled_for(layout):
            done = self._body(
                inputs_embeds=rows_NH[None],
                position_ids=positions,
                use_cache=False,
                **{LAYOUT: layout},
            )
        return done.last_hidden_state[0]

    def head(self, last_NH: Tensor) -> Tensor:
        """Return logits [N, V]."""
        return self._model(inputs_embeds=last_NH[None], use_cache=False).logits[0]

    def whole(self, ids_N: Tensor, layout: Layout) -> Tensor:
        """Return logits [N, V] of one text from its beginning, with the model's own embedding and
        positions.
        """
        setattr(self._model, self._name, self._body)
        try:
            return self._model(input_ids=ids_N[None], use_cache=False, **{LAYOUT: layout}).logits[0]
        finally:
            setattr(self._model, self._name, self._stub)
