"""Configuration of a draft head: its sizes, its target model, and the target's layers whose inputs
(taps) it reads.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec
import torch

from fleet.core.errors import ConfigError

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NUM_TAPS = 3


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return the three layers that a head taps by default, for a target of `num_layers` (L) layers:
    (2, L // 2, L - 3); with fewer than seven layers, three different ones.

    Source: `SupportsEagle3.get_eagle3_default_aux_hidden_state_layers` of vLLM 0.32, counted in the
    same way.
    Raises: ConfigError for a target with fewer than three layers.
    """
    if num_layers < NUM_TAPS:
        raise ConfigError(
            f"num_layers: a draft head taps {NUM_TAPS} layers, the target has {num_layers}",
            param="num_layers",
        )
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return (1 if num_layers > NUM_TAPS else 0), num_layers // 2, num_layers - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Configuration of a draft head.

    `layer_ids`: the target's layers whose inputs the head reads, counted from 0. `hidden_size`,
    `num_layers`, `vocab_size`: sizes of the target. `target_hash`: hash of the target's weights,
    whose embedding the head shares. `num_kv_heads`, `head_dim`: must equal the target's if the
    head's keys and values are to be one more layer of the target's KV pool. `norm_before_residual`:
    True if the layer adds its attention to the normed hidden state instead of the hidden state
    itself.

    Raises: ConfigError with the name of the field.
    """

    hidden_size: int
    num_layers: int
    layer_ids: tuple[int, int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    target_hash: str
    dtype: str = "float32"
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "draft_vocab_size",
            "max_positions",
            "rope_theta",
            "norm_eps",
        ):
            self._require(name, getattr(self, name) > 0, "a number above 0")
        self._require(
            "num_heads",
            self.num_heads % self.num_kv_heads == 0,
            f"a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        self._require("head_dim", self.head_dim % 2 == 0, "an even number")
        self._require(
            "draft_vocab_size",
            self.draft_vocab_size <= self.vocab_size,
            f"at most vocab_size ({self.vocab_size})",
        )
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        ids = self.layer_ids
        is_valid = (
            len(ids) == NUM_TAPS
            and list(ids) == sorted(set(ids))
            and 0 <= ids[0]
            and ids[-1] < self.num_layers
        )
        self._require(
            "layer_ids",
            is_valid,
            f"{NUM_TAPS} different layers of 0..{self.num_layers - 1} in ascending order",
        )

    def _require(self, name: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise ConfigError(
                f"draft head: {name} must be {wanted}, not {getattr(self, name)}", param=name
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def tap_width(self) -> int:
        return NUM_TAPS * self.hidden_size

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @staticmethod
    def from_json(values: Any, source: str) -> "Eagle3Config":
        """Create a configuration from what `as_json` returned. `source`: name of the file in
        errors.

        Raises: ConfigError with the name of a missing, unknown or wrong field.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: the configuration is not an object of JSON", param="config"
            )
        names = [field.name for field in fields(Eagle3Config)]
        check_names(values, names, source, "field")
        try:
            return msgspec.convert(dict(values), Eagle3Config)
        except msgspec.ValidationError as error:
            field = re.search(r"\$\.(\w+)", str(error))
            raise ConfigError(f"{source}: {error}", param=field[1] if field else None) from error


def check_names(given: Mapping[str, object], wanted: list[str], source: str, kind: str) -> None:
    """Raise ConfigError if a name in `wanted` is missing from `given`, or `given` has an unknown
    name.

    `source`, `kind`: file and kind of name ("field") in the error.
    """
    missing = [name for name in wanted if name not in given]
    if missing:
        raise ConfigError(
            f"{source}: no {kind} {missing[0]} ({len(missing)} missing)", param=missing[0]
        )
    unknown = sorted(set(given) - set(wanted))
    if unknown:
        raise ConfigError(
            f"{source}: unknown {kind} {unknown[0]} ({len(unknown)} unknown)", param=unknown[0]
        )
