"""Rotary embeddings whose frequencies depend on the length of the text, for rows of many texts.

`transformers` chooses the frequencies of a call by the largest position in it. So the rows of a
prompt are scaled by its length, and each later row by its own position. Here rows of several
requests share a call: the model's own rotary embedding is called once for each length among them,
with a padding row at the last position of that length.
Source: transformers 5.23, `modeling_rope_utils.dynamic_rope_update`. Legend: N rows of a pass.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from fleet.engine.torch.layout import Layout
from fleet.engine.torch.tiles import TILE_ROWS

LONGROPE, DYNAMIC, DEFAULT = "longrope", "dynamic", "default"
RECOMPUTING = {"phi3", "phi4_multimodal", "phimoe"}
"""Architectures whose `generate` computes the whole text again, with the other frequencies, once an
answer makes it longer than `original_max_position_embeddings` (`prepare_inputs_for_generation`).
The others keep the earlier rows.
"""
Embeddings = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Frequencies by the length of a text, in tokens.

    A text longer than a limit of `limits` has other frequencies than a shorter text. Every length
    above `exact_above` has its own. `recomputed_above`: once an answer makes its text longer than
    this, all rows before are computed again.
    """

    limits: tuple[int, ...]
    exact_above: int | None = None
    recomputed_above: int | None = None

    def scaled_len(self, length: int) -> int:
        """Return the shortest length with the same frequencies; 0 if a short text has them."""
        if self.exact_above is not None and length > self.exact_above:
            return length
        return max((limit + 1 for limit in self.limits if length > limit), default=0)

    def least_len(self, num_prompt: int, num_rows: int) -> int:
        """Return the length by which each row of a text is scaled at least.

        This is the prompt's length, or the length at which the text was computed again. `num_rows`
        counts the rows of prompt and answer so far.
        """
        again = self.recomputed_above
        if again is not None and num_prompt <= again < num_rows:
            return self.scaled_len(again + 1)
        return self.scaled_len(num_prompt)

    def num_left(self, num_prompt: int, num_rows: int) -> int | None:
        """Return how many rows may follow before all are computed again; None if they never are."""
        again = self.recomputed_above
        if again is None or num_rows > again:
            return None
        if self.least_len(num_prompt, again + 1) == self.scaled_len(num_prompt):
            return None
        return again - num_rows


def rope_forms(config: PretrainedConfig) -> Sequence[Mapping[str, Any]]:
    """Return the model's settings of rotary embeddings, which may differ by kind of layer."""
    found: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found or not all(isinstance(form, Mapping) for form in found.values()):
        return [found]
    return list(found.values())


def rope_types(config: PretrainedConfig) -> str:
    """Return the kinds of rotary embeddings as an error names them."""
    kinds = {str(form.get("rope_type", DEFAULT)) for form in rope_forms(config)}
    return "rope_type " + ", ".join(f"'{kind}'" for kind in sorted(kinds or {DEFAULT}))


def read_scaling(config: PretrainedConfig) -> RopeScaling | None:
    """Return how a model's rotary embeddings depend on the length; None if they do not."""
    kinds = [(str(form.get("rope_type", DEFAULT)), form) for form in rope_forms(config)]
    original = "original_max_position_embeddings"
    limits = {int(form[original]) for kind, form in kinds if kind == LONGROPE}
    exact_above: int | None = None
    if any(kind == DYNAMIC for kind, _ in kinds):
        exact_above = int(config.max_position_embeddings)
        limits.add(exact_above)
    if not limits:
        return None
    return RopeScaling(
        limits=tuple(sorted(limits)),
        exact_above=exact_above,
        recomputed_above=getattr(config, original, None)
        if config.model_type in RECOMPUTING
        else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaledRows:
    """Rows of a step with the frequencies of a text of `length`; 0: of a short text."""

    length: int
    rows: Tensor

    def positions(self, positions_N: Tensor) -> Tensor:
        """Return the rows' positions, and as padding the last position of `length`, at least once.

        Results of whole tiles do not depend on the number of rows.
        """
        num_padding = TILE_ROWS - len(self.rows) % TILE_ROWS
        size = (*positions_N.shape[:-1], num_padding)
        padding = positions_N.new_full(size, max(0, self.length - 1))
        return torch.cat([positions_N.index_select(-1, self.rows), padding], -1)


class RowRotary(nn.Module):
    """A model's rotary embedding, with the rows of a pass as `alike` divides them.

    Without `alike` it computes what the model computes by itself.
    """

    def __init__(self, own: nn.Module, *, keeps_length: bool) -> None:
        """`keeps_length`: `own` keeps a long text's frequencies until a short one follows."""
        super().__init__()
        self._own, self._keeps_length = own, keeps_length
        self.alike: Sequence[_ScaledRows] = ()
        self.places = torch.empty(0, dtype=torch.int64)
        """For each row of the pass, its place among the rows of `alike`."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **others: Any) -> Embeddings:
        if x.is_meta:  # the length would be read from the positions
            plain = inspect.unwrap(type(self._own).forward)
            return plain(self._own, x, position_ids, *args, **others)
        if not self.alike:
            return self._own(x, position_ids, *args, **others)
        if len(self.alike) == 1 and self.alike[0].length == 0:
            return self._of_length(x, position_ids, *args, **others)
        parts: list[tuple[Tensor, ...]] = []
        is_tuple = True
        for alike in self.alike:
            made = self._of_length(x, alike.positions(position_ids), *args, **others)
            is_tuple = isinstance(made, tuple)
            tensors = made if isinstance(made, tuple) else (made,)
            parts.append(tuple(one[:, : len(alike.rows)] for one in tensors))
        whole = [torch.cat(each, 1) for each in zip(*parts, strict=True)]
        ordered = tuple(one.index_select(1, self.places) for one in whole)
        return ordered if is_tuple else ordered[0]

    def _of_length(self, x: Tensor, positions: Tensor, *args: Any, **others: Any) -> Embeddings:
        if self._keeps_length:
            self._own(x, torch.zeros_like(positions), *args, **others)
        return self._own(x, positions, *args, **others)


class Rotaries:
    """The rotary embeddings of a model. Without `scaling` they are used as they are."""

    def __init__(self, model: nn.Module, scaling: RopeScaling | None) -> None:
        self._scaling = scaling
        self._found: list[RowRotary] = []
        if scaling is not None:
            self.add(model, scaling)

    def add(self, model: nn.Module, scaling: RopeScaling) -> None:
        """Replace the parts of a model that compute embeddings from positions alone."""
        made: dict[nn.Module, RowRotary] = {}
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, RowRotary) or not _is_rotary(child):
                    continue
                keeps_length = scaling.exact_above is not None
                made[child] = made.get(child) or RowRotary(child, keeps_length=keeps_length)
                setattr(parent, name, made[child])
        self._found += made.values()

    @contextmanager
    def scaled_for(self, layout: Layout) -> Iterator[None]:
        """Let the model compute the rows of a layout, each by its own length."""
        if self._scaling is None or not layout.rope_lens:
            yield
            return
        lengths = map(self._scaling.scaled_len, layout.rope_lens)
        alike, places = _grouped(lengths, layout.positions.device)
        for rotary in self._found:
            rotary.alike, rotary.places = alike, places
        try:
            yield
        finally:
            for rotary in self._found:
                rotary.alike = ()


def _is_rotary(part: nn.Module) -> bool:
    names = inspect.signature(cast(Any, part.forward)).parameters
    return "position_ids" in names and not any(True for _ in part.parameters())


def _grouped(lengths: Iterable[int], device: torch.device) -> tuple[Sequence[_ScaledRows], Tensor]:
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        rows_of[length].append(row)
    alike = [
        _ScaledRows(length=length, rows=torch.tensor(rows, device=device))
        for length, rows in rows_of.items()
    ]
    return alike, torch.cat([each.rows for each in alike]).argsort()
