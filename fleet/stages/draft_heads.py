"""Draft heads of a stage: the configuration of a new head, and the replacement of a head by another
version while the stage runs.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.config import Eagle3Config, default_layer_ids
from fleet.drafts.eagle3.drafter import HeadDrafter
from fleet.drafts.eagle3.files import in_dtype, pack_head, packed_bytes, unpack_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.figures.speculation import EAGLE3
from fleet.drafts.figures.training import DraftVersion
from fleet.drafts.speculation import Speculation
from fleet.engine.base import Engine
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.lm_engine import LMEngine
from fleet.models.target_hash import hash_of_target
from fleet.stages.base import HeadExchange
from fleet.stages.options import BuildOptions

ROPE_THETA, NORM_EPS, POSITIONS = 10_000.0, 1e-6, 32_768
"""Configuration values of a new head for a model whose own configuration lacks them."""


def new_head_config(
    options: BuildOptions, text: Any, shape: KVShape, max_positions: int | None
) -> Eagle3Config:
    """Return the configuration of a new draft head for a stage's model. `text`: `transformers`
    configuration of the stage's decoder; `shape`: KV shape of its layers; `max_positions`: context
    length, if known.
    """
    hidden, vocab = int(text.hidden_size), int(text.vocab_size)
    num_layers, num_heads = int(text.num_hidden_layers), int(text.num_attention_heads)
    rope = getattr(text, "rope_parameters", None) or {}
    return Eagle3Config(
        hidden_size=hidden,
        num_layers=num_layers,
        layer_ids=default_layer_ids(num_layers),
        # as many heads as the target has, or the next multiple of its key/value heads
        num_heads=-(-num_heads // shape.num_kv_heads) * shape.num_kv_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=int(getattr(text, "intermediate_size", 0) or 4 * hidden),
        rope_theta=float(rope.get("rope_theta", ROPE_THETA)),
        norm_eps=float(getattr(text, "rms_norm_eps", NORM_EPS)),
        vocab_size=vocab,
        draft_vocab_size=min(options.config.training.draft_vocab_size, vocab),
        max_positions=max_positions or POSITIONS,
        target_hash=hash_of_target(options.checkpoint),
    )


def exchange_of(
    options: BuildOptions, engine: Engine, config: Callable[[KVShape], Eagle3Config]
) -> HeadExchange | None:
    """Return the means to exchange an engine's draft head; None if the engine does not draft with a
    head. `config`: function that returns the configuration of a new head for a KV shape.
    """
    if not isinstance(engine, LMEngine) or not isinstance(engine.speculation, Speculation):
        return None
    drafter = engine.speculation.drafter_of(EAGLE3)
    if not isinstance(drafter, HeadDrafter):
        return None
    wanted = config(engine.pool.shape)
    if drafter.head is not None:  # its layers are those that the program reads
        wanted = dataclasses.replace(wanted, layer_ids=drafter.head.config.layer_ids)
    return DraftHeads(
        drafter, engine.speculation, wanted, options.compute_dtype, engine.pool.data.device
    )


class DraftHeads(HeadExchange):
    """Exchange of the draft head of an `LMEngine`, between two of its steps."""

    def __init__(
        self,
        drafter: HeadDrafter,
        speculation: Speculation,
        config: Eagle3Config,
        dtype: str,
        device: torch.device,
    ) -> None:
        self._drafter = drafter
        self._speculation = speculation
        self._config = config
        self._dtype = dtype
        self._device = device
        self._first = drafter.head

    @property
    def capacity_bytes(self) -> int:
        return packed_bytes(self._config)

    def prepare(self, data: bytes, sha256: str) -> object:
        """Load a packed head. Raises: ConfigError if it is damaged, has another hash, or does not
        fit the stage's model.
        """
        head = _unpack(data, sha256, self._config, self._device)
        own, wanted = head.config, self._config
        for name in (
            "num_layers",
            "hidden_size",
            "num_kv_heads",
            "head_dim",
            "layer_ids",
            "vocab_size",
        ):
            if getattr(own, name) != getattr(wanted, name):
                message = (
                    f"draft head: made for {name} {getattr(own, name)}, this model has "
                    f"{getattr(wanted, name)}"
                )
                raise ConfigError(message, param=name)
        return in_dtype(head, self._dtype)

    def use(self, prepared: object, version: DraftVersion | None) -> None:
        """Draft with a head from `prepare` from the next step on; None restores the head with which
        the stage started.
        """
        self._drafter.exchange(self._first if prepared is None else cast(Eagle3Head, prepared))
        self._speculation.on_new_head(version)


class StoredHeads(HeadExchange):
    """Exchange of the trainer, which drafts nothing: serves packed heads from its folder to other
    workers.
    """

    def __init__(self, folder: Path, config: Eagle3Config) -> None:
        self._folder, self._config = folder, config

    @property
    def capacity_bytes(self) -> int:
        return packed_bytes(self._config)

    def prepare(self, data: bytes, sha256: str) -> object:
        """Check a packed head and discard it. Raises: ConfigError if the head is damaged, or has
        another hash.
        """
        _unpack(data, sha256, self._config, torch.device("cpu"))
        return None

    def use(self, prepared: object, version: DraftVersion | None) -> None:
        """Do nothing: the trainer drafts nothing."""

    def read_local(self, sha256: str) -> bytes | None:
        return pack_head(self._folder / sha256) if (self._folder / sha256).is_dir() else None


def _unpack(data: bytes, sha256: str, config: Eagle3Config, device: torch.device) -> Eagle3Head:
    """Return the head in packed bytes. Raises: ConfigError if the head is damaged, or has another
    hash.
    """
    head, found = unpack_head(data, device=device, target_hash=config.target_hash)
    if found != sha256:
        raise ConfigError(
            f"draft head: its weights have the hash {found}, expected {sha256}", param="sha256"
        )
    return head
