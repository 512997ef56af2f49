"""Rotary embeddings whose frequencies depend on the length of the text, for batches of positions of
many texts.

`transformers` chooses the frequencies of a call by the largest position in it: a prompt is scaled
by its length, and each later token by its own position. Here positions of several requests share a
call, so the model's own rotary embedding is called once for each distinct length, with padding at
the last position of that length. Source: transformers 5.23,
`modeling_rope_utils.dynamic_rope_update`. Legend: N positions of a step.
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
"""Architectures whose `generate` recomputes the whole text with other frequencies once an answer
makes it longer than `original_max_position_embeddings` (`prepare_inputs_for_generation`). All other
architectures keep the keys and values of earlier positions.
"""
Embeddings = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Dependence of a model's rotary frequencies on the length of the text, in tokens.

    `limits`: lengths beyond which the frequencies change. `exact_above`: length beyond which every
    length has frequencies of its own; None: no such length. `recomputed_above`: length beyond which
    a growing answer makes all earlier positions be recomputed; None: never.
    """

    limits: tuple[int, ...]
    exact_above: int | None = None
    recomputed_above: int | None = None

    def scaled_len(self, length: int) -> int:
        """Return the shortest text length that has the same frequencies as `length`; 0 for the
        frequencies of a short text.
        """
        if self.exact_above is not None and length > self.exact_above:
            return length
        return max((limit + 1 for limit in self.limits if length > limit), default=0)

    def least_len(self, num_prompt: int, num_rows: int) -> int:
        """Return the length by which every position of a text is scaled at least: the prompt's
        length, or the length at which the text was recomputed.

        `num_prompt`: tokens of the prompt. `num_rows`: tokens of prompt and answer so far.
        """
        again = self.recomputed_above
        if again is not None and num_prompt <= again < num_rows:
            return self.scaled_len(again + 1)
        return self.scaled_len(num_prompt)

    def num_left(self, num_prompt: int, num_rows: int) -> int | None:
        """Return how many more tokens a text may get before all its positions are recomputed; None
        if no recomputation lies ahead.
        """
        again = self.recomputed_above
        if again is None or num_rows > again:
            return None
        if self.least_len(num_prompt, again + 1) == self.scaled_len(num_prompt):
            return None
        return again - num_rows


def rope_forms(config: PretrainedConfig) -> Sequence[Mapping[str, Any]]:
    """Return the rotary embedding settings in a model's configuration: one, or one per kind of
    layer.
    """
    found: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found or not all(isinstance(form, Mapping) for form in found.values()):
        return [found]
    return list(found.values())


def rope_types(config: PretrainedConfig) -> str:
    """Return the kinds of a model's rotary embeddings as text for an error, such as `rope_type
    'yarn'`.
    """
    kinds = {str(form.get("rope_type", DEFAULT)) for form in rope_forms(config)}
    return "rope_type " + ", ".join(f"'{kind}'" for kind in sorted(kinds or {DEFAULT}))


def read_scaling(config: PretrainedConfig) -> RopeScaling | None:
    """Return the dependence of a model's rotary frequencies on the text length, read from its
    configuration; None if there is none.
    """
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
    """Positions of a step whose rotary frequencies belong to a text of `length` tokens; 0 stands
    for a short text. `rows`: indices of the positions in the step.
    """

    length: int
    rows: Tensor

    def positions(self, positions_N: Tensor) -> Tensor:
        """Return the group's positions, padded at least once with the last position of `length`, so
        that the model chooses the frequencies of that length.

        Pads to whole tiles, whose results do not depend on the number of positions.
        """
        num_padding = TILE_ROWS - len(self.rows) % TILE_ROWS
        size = (*positions_N.shape[:-1], num_padding)
        padding = positions_N.new_full(size, max(0, self.length - 1))
        return torch.cat([positions_N.index_select(-1, self.rows), padding], -1)


class RowRotary(nn.Module):
    """Wrapper of a model's rotary embedding module that computes each group of positions in `alike`
    with the frequencies of its own text length.

    If `alike` is empty, computes what the wrapped module computes.
    """

    def __init__(self, own: nn.Module, *, keeps_length: bool) -> None:
        """Wrap the module `own`. `keeps_length`: after a long text, `own` keeps using that text's
        frequencies until its next call for a short text.
        """
        super().__init__()
        self._own, self._keeps_length = own, keeps_length
        self.alike: Sequence[_ScaledRows] = ()
        self.places = torch.empty(0, dtype=torch.int64)
        """For each position of the step, its index among the concatenated groups of `alike`."""

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
    """All rotary embeddings of a model, wrapped so that each position is scaled by the length of
    its own text. Without `scaling` the model is left as it is.
    """

    def __init__(self, model: nn.Module, scaling: RopeScaling | None) -> None:
        self._scaling = scaling
        self._found: list[RowRotary] = []
        if scaling is not None:
            self.add(model, scaling)

    def add(self, model: nn.Module, scaling: RopeScaling) -> None:
        """Wrap the modules of a model that compute rotary embeddings from positions alone."""
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
        """Context manager within which the model scales each position of a layout by the length of
        its own text (`layout.rope_lens`).
        """
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
