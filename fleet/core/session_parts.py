"""Parts of a conversation's saved KV cache: their names and exact sizes, and checks of a
description and its parts.

Sizes follow from the description alone, so a worker checks an offered cache before it allocates
anything. Knows no file, no connection and no engine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.core.errors import BadInput
from fleet.core.session_messages import SessionInfo

KEYS, POSITIONS, TAPPED = "keys", "positions", "tapped"
KEY_BYTES, POSITION_BYTES, VALUE_BYTES = 8, 4, 4
"""Sizes in bytes: one position's prefix key (int64), one position number (int32), and one value of
a tapped hidden state (float32).
"""
MAX_LAYERS = 4096
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_LAYOUT = re.compile(r"(\w{1,16}), ([1-9]\d{0,5}) heads of ([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLayout:
    """Layout of one position's keys and values in one layer. `dtype`: name of the torch dtype."""

    dtype: str
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.dtype}, {self.num_kv_heads} heads of {self.head_dim}"

    @property
    def row_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * _ITEM_BYTES[self.dtype]

    @staticmethod
    def parse(text: str) -> "SessionLayout":
        """Parse the text form of a layout, as `str` returns it. Raises: BadInput."""
        found = _LAYOUT.fullmatch(text)
        if found is None or found[1] not in _ITEM_BYTES:
            raise BadInput(f"the layout of the rows is unreadable: {text[:64]!r}")
        return SessionLayout(dtype=found[1], num_kv_heads=int(found[2]), head_dim=int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of the sessions that an engine can cache. `layout`: keys and values of one position in
    one layer. `max_rows`: number of positions that the KV pool holds.

    `tapped_width`: number of values in the tapped layers' hidden states at one position; 0 for a
    model without tapped layers.
    """

    layout: SessionLayout
    num_layers: int
    max_rows: int
    tapped_width: int = 0

    @property
    def max_part_bytes(self) -> int:
        """Size in bytes of the largest part that a session can have."""
        row_bytes = max(self.layout.row_bytes, KEY_BYTES, VALUE_BYTES * self.tapped_width)
        return self.max_rows * row_bytes

    def check(self, num_rows: int, num_layers: int, layout: str) -> None:
        """Check that the engine can cache a session of this size and layout, at least in an empty
        KV pool. Raises: BadInput if it cannot.
        """
        if (layout, num_layers) != (str(self.layout), self.num_layers):
            own = f"this model {self.num_layers} of {self.layout}"
            raise BadInput(f"the file has {num_layers} layers of {layout}, {own}")
        if not 0 < num_rows <= self.max_rows:
            raise BadInput(
                f"the file has {num_rows} rows; this worker can cache 1 to {self.max_rows}"
            )

    def check_tapped(self, num_rows: int, positions: Mapping[int, int]) -> None:
        """Check the tapped hidden states of a session of `num_rows` positions. `positions`: number
        of values by position. Raises: BadInput.
        """
        if any(not 0 <= at < num_rows for at in positions):
            raise BadInput(f"a tapped row is not among the {num_rows} rows of the file")
        widths = {width for width in positions.values() if width != self.tapped_width}
        if widths:
            raise BadInput(
                f"tapped rows have {min(widths)} values, those of this model {self.tapped_width}"
            )


def check_info(info: SessionInfo) -> None:
    """Check the description of a session. Raises: BadInput if no session can have it."""
    SessionLayout.parse(info.layout)
    if info.num_rows < 1:
        raise BadInput(f"the session has {info.num_rows} rows")
    if not 1 <= info.num_layers <= MAX_LAYERS:
        raise BadInput(f"the session has {info.num_layers} layers, not 1 to {MAX_LAYERS}")


def check_part(info: SessionInfo, name: str, num_bytes: int) -> None:
    """Check the name and size of one part of a session whose description was checked. Raises:
    BadInput.
    """
    if name in (POSITIONS, TAPPED):
        unit = POSITION_BYTES if name == POSITIONS else VALUE_BYTES
        if not num_bytes or num_bytes % unit:
            raise BadInput(f"the part {name} of the session has {num_bytes} bytes")
        return
    if name != KEYS and not (name.isascii() and name.isdecimal() and name == str(int(name[:9]))):
        raise BadInput(f"the part {name[:64]!r} of the session is unknown")
    if name != KEYS and int(name) >= info.num_layers:
        raise BadInput(f"the part {name} of the session is none of {info.num_layers} layers")
    row_bytes = KEY_BYTES if name == KEYS else SessionLayout.parse(info.layout).row_bytes
    if num_bytes != info.num_rows * row_bytes:
        raise BadInput(
            f"the part {name} of the session has {num_bytes} bytes, not {info.num_rows * row_bytes}"
        )


def check_parts(info: SessionInfo, sizes: Mapping[str, int]) -> None:
    """Check that a session is complete, and the size of every part. `sizes`: bytes of each part by
    name. Raises: BadInput.
    """
    check_info(info)
    wanted = [KEYS, *map(str, range(info.num_layers))]
    missing = [name for name in wanted if name not in sizes]
    if missing:
        raise BadInput(f"the session lacks {', '.join(missing[:3])}; save the session again")
    for name, num_bytes in sizes.items():
        check_part(info, name, num_bytes)
    num_positions, tapped_bytes = sizes.get(POSITIONS, 0) // POSITION_BYTES, sizes.get(TAPPED, 0)
    if bool(num_positions) != bool(tapped_bytes) or num_positions > info.num_rows:
        raise BadInput(
            f"the session has {num_positions} positions of {tapped_bytes} bytes of tapped rows"
        )
    if num_positions and tapped_bytes % (VALUE_BYTES * num_positions):
        raise BadInput(f"{tapped_bytes} bytes are not {num_positions} tapped rows")
