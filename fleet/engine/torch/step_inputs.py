"""Inputs of a decode step as tensors of fixed shapes and addresses, so that a captured graph can
read them. Knows no model. `prompt_graphs` has the inputs of prompts.

Legend: B rows of the step (one per request, the last ones padding), H hidden size, P pages of a
request, Q codes of a sampled token, V vocabulary, W bytes with a bit for each id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent, slots_of
from fleet.engine.torch.noise import noise_keys
from fleet.engine.torch.sampling import UNSEEN, RowSampling

POSITION, SLOT, TOP_K, IS_SAMPLED, BANS_END, NUM_INTS = range(6)
TEMPERATURE, TOP_P, REPETITION, FREQUENCY, PRESENCE, NUM_FLOATS = range(6)
MASK32 = np.uint64(0xFFFFFFFF)
ALL = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawInputs:
    """Sampling parameters of each row of a decode step. Shapes: [B, 1], except noise keys (low and
    high half, [B, Q]) and counts [B, V].

    `counts_BV`: values of `TokenCounts.dense`; not used in rows without penalties. `allowed_BW`:
    bytes of `RowSampling.allowed`, whose lowest bit is the first id; all bits are 1 in rows without
    a rule.
    """

    top_k: Tensor
    is_sampled: Tensor
    bans_end: Tensor
    temperature: Tensor
    top_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    noise_low_BQ: Tensor
    noise_high_BQ: Tensor
    counts_BV: Tensor
    allowed_BW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs:
    """Rows of a captured step and their places. `rows_BH`: embedding of each row. `positions_B`:
    its position in its request. `slots_B`: KV pool slot of this position. `pages_BP`: pages of the
    request's context.
    """

    rows_BH: Tensor
    positions_B: Tensor
    slots_B: Tensor
    pages_BP: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(RowInputs):
    """Inputs of a decode step: the newest position of each request, and its sampling parameters."""

    draws: DrawInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a program's decode step. `num_codes`: Q; `num_ids`: V. `salt`: number that makes the
    sampling noise of each stage different.
    """

    hidden_size: int
    num_codes: int
    num_ids: int
    salt: int


class StepBuffers:
    """Input tensors of a decode step of `num_rows` rows. A row that is not filled is padding,
    computed on the scratch page.

    The host fills pinned memory, which is copied to the device's tensors without waiting. Filling
    the buffers again waits for these copies, which ended before the host read the step's codes.
    """

    def __init__(self, shape: StepShape, pool: KVPool, num_rows: int, num_pages: int) -> None:
        self._shape = shape
        self._pool = pool
        self._num_pages = num_pages
        device, num_codes = pool.data.device, shape.num_codes
        sizes = {
            "ints": NUM_INTS + 2 * num_codes,
            "floats": NUM_FLOATS,
            "pages": num_pages,
            "counts": shape.num_ids,
            "allowed": -(-shape.num_ids // 8),
        }
        dtypes = {
            "ints": torch.int64,
            "floats": torch.float32,
            "pages": torch.int32,
            "counts": torch.int16,
            "allowed": torch.uint8,
        }
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        pin = self._copied is not None
        self._host = {
            name: torch.zeros(num_rows, size, dtype=dtypes[name], pin_memory=pin)
            for name, size in sizes.items()
        }
        self._device = {name: host.to(device, copy=True) for name, host in self._host.items()}
        self._ints = self._host["ints"].numpy()
        self._floats = self._host["floats"].numpy()
        self._pages = self._host["pages"].numpy()
        self._counts = self._host["counts"].numpy()
        self._allowed = self._host["allowed"].numpy()
        self.inputs = self._views(
            torch.zeros(num_rows, shape.hidden_size, dtype=pool.data.dtype, device=device)
        )
        self._counts[:] = UNSEEN
        self._allowed[:] = ALL
        self._has_rules = False
        self._fill_padding(0)
        self._copy(*self._host)

    def _views(self, rows_BH: Tensor) -> StepInputs:
        ints, floats, num_codes = (
            self._device["ints"],
            self._device["floats"],
            self._shape.num_codes,
        )
        low_BQ, high_BQ = ints[:, NUM_INTS:].split(num_codes, 1)
        draws = DrawInputs(
            top_k=ints[:, TOP_K, None],
            is_sampled=ints[:, IS_SAMPLED, None],
            bans_end=ints[:, BANS_END, None],
            temperature=floats[:, TEMPERATURE, None],
            top_p=floats[:, TOP_P, None],
            repetition=floats[:, REPETITION, None],
            frequency=floats[:, FREQUENCY, None],
            presence=floats[:, PRESENCE, None],
            noise_low_BQ=low_BQ,
            noise_high_BQ=high_BQ,
            counts_BV=self._device["counts"],
            allowed_BW=self._device["allowed"],
        )
        return StepInputs(
            rows_BH=rows_BH,
            positions_B=ints[:, POSITION],
            slots_B=ints[:, SLOT],
            pages_BP=self._device["pages"],
            draws=draws,
        )

    def fill(
        self,
        rows_BH: Tensor,
        extents: Sequence[Extent],
        draws: Sequence[RowSampling],
        indices: Sequence[int],
    ) -> None:
        """Fill the first rows with one position each. `rows_BH`: embeddings; `extents`: one
        position per request; `draws`: sampling parameters; `indices`: number of tokens that each
        request has sampled.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self._fill_places(extents)
        self._fill_rest(rows_BH, draws, indices)

    def fill_draws(
        self, last_BH: Tensor, draws: Sequence[RowSampling], indices: Sequence[int]
    ) -> None:
        """Fill the first rows for sampling alone: `last_BH` are final hidden states, of which
        neither positions nor pages are needed. `draws` and `indices` are
        those parameters of `fill`.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self._fill_rest(last_BH, draws, indices)

    def _fill_rest(
        self, rows_BH: Tensor, draws: Sequence[RowSampling], indices: Sequence[int]
    ) -> None:
        used = len(draws)
        self._fill_draws(draws, indices)
        self._fill_padding(used)
        self._copy("ints", "floats", "pages")
        if any(draw.penalised for draw in draws):
            self._fill_counts(draws)
            self._copy("counts")
        self._fill_allowed(draws)
        self.inputs.rows_BH[:used].copy_(rows_BH)
        # a padding row writes to the scratch page, which must stay finite
        self.inputs.rows_BH[used:].zero_()

    def _fill_places(self, extents: Sequence[Extent]) -> None:
        used = len(extents)
        self._ints[:used, POSITION] = [extent.start for extent in extents]
        self._ints[:used, SLOT] = slots_of(extents, self._pool)
        for row, extent in enumerate(extents):
            pages = extent.table.pages[: self._num_pages]
            self._pages[row, : len(pages)] = pages
            self._pages[row, len(pages) :] = self._pool.scratch_page

    def _fill_draws(self, draws: Sequence[RowSampling], indices: Sequence[int]) -> None:
        used, (num_ids, num_codes) = len(draws), (self._shape.num_ids, self._shape.num_codes)
        all_of = [draw.sampling for draw in draws]
        top_k = [sampling.top_k if 0 < sampling.top_k < num_ids else num_ids for sampling in all_of]
        self._ints[:used, TOP_K] = top_k
        self._ints[:used, IS_SAMPLED] = [not draw.greedy for draw in draws]
        self._ints[:used, BANS_END] = [bool(draw.banned) for draw in draws]
        keys = noise_keys(
            [sampling.seed for sampling in all_of], self._shape.salt, num_codes, indices
        )
        self._ints[:used, NUM_INTS:] = np.concatenate([keys & MASK32, keys >> np.uint64(32)], 1)
        self._floats[:used, TEMPERATURE] = [
            1.0 if draw.greedy else draw.sampling.temperature for draw in draws
        ]
        self._floats[:used, TOP_P] = [sampling.top_p for sampling in all_of]
        self._floats[:used, REPETITION] = [sampling.repetition_penalty for sampling in all_of]
        self._floats[:used, FREQUENCY] = [sampling.frequency_penalty for sampling in all_of]
        self._floats[:used, PRESENCE] = [sampling.presence_penalty for sampling in all_of]

    def _fill_counts(self, draws: Sequence[RowSampling]) -> None:
        for row, draw in enumerate(draws):
            if draw.penalised and draw.counts is not None:
                self._counts[row] = draw.counts.dense(self._shape.num_ids)

    def _fill_allowed(self, draws: Sequence[RowSampling]) -> None:
        """Fill in which ids each row may sample. Does nothing if no row has a rule, in this step
        or in the previous one.
        """
        had_rules, self._has_rules = self._has_rules, any(row.allowed is not None for row in draws)
        if not (had_rules or self._has_rules):
            return
        self._allowed[:] = ALL
        for row, draw in enumerate(draws):
            if draw.allowed is not None:
                self._allowed[row] = np.packbits(draw.allowed, bitorder="little")
        self._copy("allowed")

    def _fill_padding(self, first: int) -> None:
        """Fill the rows from number `first` to the last with padding: greedy sampling at position 0
        of the scratch page.
        """
        self._ints[first:] = 0
        self._ints[first:, SLOT] = self._pool.scratch_page * self._pool.page_size
        self._ints[first:, TOP_K] = self._shape.num_ids
        self._floats[first:] = [1.0, 1.0, 1.0, 0.0, 0.0]
        self._pages[first:] = self._pool.scratch_page

    def _copy(self, *names: str) -> None:
        for name in names:
            self._device[name].copy_(self._host[name], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._pool.data.device))
