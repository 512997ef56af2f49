"""Fleet's file format of a draft head: weights as safetensors, and JSON with the configuration and
the hash of the weights' bytes.

The target's embedding is not stored. `speculators` and `sglang` write formats of other programs.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.drafts.eagle3.config import Eagle3Config, check_names
from fleet.drafts.eagle3.head import Eagle3Head, weight_shapes

CONFIG_FILE, WEIGHTS_FILE = "eagle3.json", "eagle3.safetensors"
FORMAT = 1
"""Version of the file format. Readers refuse other versions."""
VOCABULARY = "vocabulary"
HEADER_BYTES = 1 << 16
"""Upper bound of the JSON's size and of the safetensors header together."""


def save_head(head: Eagle3Head, folder: Path) -> str:
    """Write a head to `folder`, which is created; return the SHA-256 of the weights' bytes. Equal
    heads give equal bytes.

    A reader never sees a part of a file. The JSON is written last, and its hash does not match
    other weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return write_head(head, folder)


def write_head(head: Eagle3Head, folder: Path) -> str:
    """Write a head as `save_head` does, to a folder that exists."""
    weights = save({VOCABULARY: head.vocabulary_D.cpu()} | stored_weights(head))
    digest = hashlib.sha256(weights).hexdigest()
    described = {"format": FORMAT, "sha256": digest, "config": head.config.as_json()}
    write_whole(folder / WEIGHTS_FILE, weights)
    write_whole(folder / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())
    return digest


def load_head(
    folder: Path, *, device: torch.device | None = None, target_hash: str | None = None
) -> Eagle3Head:
    """Load a head from a folder that `save_head` wrote.

    `target_hash`: hash of the target that the head must belong to, if given. Raises: ConfigError
    for a missing or damaged file, a missing or unknown field or weight, weights that are not
    finite, or another target.
    """
    packed = read_bytes(folder / CONFIG_FILE), read_bytes(folder / WEIGHTS_FILE)
    return _parse_head(*packed, folder / WEIGHTS_FILE, device=device, target_hash=target_hash)


def pack_head(folder: Path) -> bytes:
    """Return a head's files as one byte string: length of the JSON (8 bytes, little-endian), JSON,
    weights.

    Raises: ConfigError if a file cannot be read.
    """
    described, weights = read_bytes(folder / CONFIG_FILE), read_bytes(folder / WEIGHTS_FILE)
    return len(described).to_bytes(8, "little") + described + weights


def unpack_head(
    data: bytes, *, device: torch.device | None = None, target_hash: str | None = None
) -> tuple[Eagle3Head, str]:
    """Load a head from bytes that `pack_head` returned; return the head and the SHA-256 of its
    weights.

    Raises: ConfigError in the same cases as `load_head`.
    """
    stop = 8 + int.from_bytes(data[:8], "little")
    head = _parse_head(
        data[8:stop], data[stop:], Path("draft head"), device=device, target_hash=target_hash
    )
    return head, hashlib.sha256(data[stop:]).hexdigest()


def packed_bytes(config: Eagle3Config) -> int:
    """Return the largest size of `pack_head`'s result for this configuration, with weights of 32
    bits.
    """
    num_values = sum(math.prod(shape) for shape in weight_shapes(config).values())
    return 4 * num_values + 8 * config.draft_vocab_size + HEADER_BYTES


def _parse_head(
    description: bytes,
    data: bytes,
    path: Path,
    *,
    device: torch.device | None,
    target_hash: str | None,
) -> Eagle3Head:
    described = parse_json(description, path.with_name(CONFIG_FILE))
    check_names(
        described, ["format", "sha256", "config"], str(path.with_name(CONFIG_FILE)), "field"
    )
    if described["format"] != FORMAT:
        raise ConfigError(
            f"{path}: format {described['format']}, this version reads {FORMAT}", param="format"
        )
    config = Eagle3Config.from_json(described["config"], str(path.with_name(CONFIG_FILE)))
    if target_hash not in (None, config.target_hash):
        raise ConfigError(
            f"{path.parent}: the draft head belongs to the target {config.target_hash}, not "
            f"{target_hash}",
            param="target_hash",
        )
    if hashlib.sha256(data).hexdigest() != described["sha256"]:
        raise ConfigError(
            f"{path}: the bytes do not match their hash in {CONFIG_FILE}; fetch it again",
            param="sha256",
        )
    weights = parse_weights(data, path)
    vocabulary_D = weights.pop(VOCABULARY, None)
    if vocabulary_D is None:
        raise ConfigError(f"{path}: no weight {VOCABULARY}", param=VOCABULARY)
    return build_head(config, vocabulary_D, weights, str(path), device=device)


def in_dtype(head: Eagle3Head, dtype: str) -> Eagle3Head:
    """Return a copy of a head in another dtype, for example to serve a head that was trained in
    float32.

    Raises: ConfigError.
    """
    config = Eagle3Config.from_json(head.config.as_json() | {"dtype": dtype}, "draft head")
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    return build_head(config, head.vocabulary_D, weights, "draft head", device=head.fc.device)


def build_head(
    config: Eagle3Config,
    vocabulary_D: Tensor,
    weights: Mapping[str, Tensor],
    source: str,
    *,
    device: torch.device | None,
) -> Eagle3Head:
    """Create a head with these weights, named as in `weight_shapes`.

    `vocabulary_D`: the target's id of each draft id. `source`: name of the file in errors. Raises:
    ConfigError with the name of a weight that is missing, unknown, of another shape or not finite.
    """
    shapes = weight_shapes(config)
    check_names(weights, list(shapes), source, "weight")
    for name, shape in shapes.items():
        check_weight(name, weights[name], shape, source)
    head = Eagle3Head(config, vocabulary_D, device=device)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(weights[name])
    return head


def check_weight(name: str, weight: Tensor, shape: tuple[int, ...], source: str) -> None:
    """Check a weight's shape, and that its values are finite. `source`: name of the file in the
    error.

    Raises: ConfigError.
    """
    if tuple(weight.shape) != shape:
        raise ConfigError(
            f"{source}: {name} has the shape {tuple(weight.shape)}, the configuration means "
            f"{shape}",
            param=name,
        )
    if not bool(weight.isfinite().all()):
        raise ConfigError(f"{source}: {name} has values that are not finite", param=name)


def stored_weights(head: Eagle3Head) -> dict[str, Tensor]:
    """Return a head's weights by name, in host memory. Raises: ConfigError if a weight is not
    finite.
    """
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.named_parameters()}
    for name, shape in weight_shapes(head.config).items():
        check_weight(name, weights[name], shape, "draft head")
    return weights


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically and durably: readers see all of it or nothing, even after a power
    failure.
    """
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_bytes(path: Path) -> bytes:
    """Return a file's contents. Raises: ConfigError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror})", param="draft_head"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises: ConfigError if it cannot be read or is not one."""
    return parse_json(read_bytes(path), path)


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """Parse bytes as a JSON object. `path`: file named in the error. Raises: ConfigError."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error})", param="draft_head") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not an object of JSON", param="draft_head")
    return cast("dict[str, Any]", values)


def parse_weights(data: bytes, path: Path) -> dict[str, Tensor]:
    """Parse bytes as safetensors; return the tensors by name. `path`: file named in the error.

    Raises: ConfigError.
    """
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{path}: not safetensors ({error}); fetch it again", param="draft_head"
        ) from error
