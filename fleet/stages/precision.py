"""Precision of a stage's weights, a setting of the stage: by name, or `fastest` for the fastest of
float32, bfloat16 and int8 on this machine.

The fastest precision is measured once and recorded in the deployment's data folder. Every worker
of the stage reads the record, now and after a restart, so that an answer which moves to another
worker is computed in one precision.
"""

import dataclasses
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from fleet.core.errors import ConfigError
from fleet.core.processor import processor_field
from fleet.models.causal_lm.precision import (
    BFLOAT16,
    FLOAT32,
    WEIGHT_BITS,
    choose_precision,
    measure_precisions,
)
from fleet.stages.options import BuildOptions

PRECISION, FASTEST = "precision", "fastest"
PRECISIONS = (FLOAT32, BFLOAT16, *WEIGHT_BITS, FASTEST)
FOLDER = "precisions"


class PrecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of precision and the measurement that led to it. `times_ms`: milliseconds per layer,
    by precision.
    """

    chosen: str
    times_ms: dict[str, float]


def with_precision(options: BuildOptions) -> tuple[BuildOptions, int]:
    """Return a stage's options with the dtype that its setting `extra.precision` asks for, and the
    number of bits of rounded weights, 0 for weights in that dtype. Without the setting, the options
    are returned as they are.

    Raises: ConfigError if the setting is invalid, or excluded by another setting.
    """
    given = options.own.extra.get(PRECISION)
    if given is None:
        return options, 0
    _check(options, given)
    precision = str(given)
    if precision == FASTEST:
        precision = _fastest(options)
    bits = WEIGHT_BITS.get(precision, 0)
    return dataclasses.replace(options, dtype=BFLOAT16 if bits else precision), bits


def _check(options: BuildOptions, given: object) -> None:
    where = f"extra.{PRECISION}"
    if given not in PRECISIONS:
        raise options.refusal(where, f"{given!r} is not one of {', '.join(PRECISIONS)}")
    if options.engine != "torch" or options.half or options.anchor is not None:
        raise options.refusal(
            where,
            "is for a whole stage on the engine torch; remove it, and set dtype or vllm."
            "quantization for the others",
        )
    if options.config.numerics == "invariant" and given not in (FLOAT32, FASTEST):
        raise options.refusal(where, "numerics: invariant computes in float32; set float32")
    if given in WEIGHT_BITS and options.device_kind != "cpu":
        raise options.refusal(
            where, f"{given} runs on a CPU, not on {options.device}; set bfloat16"
        )


def _fastest(options: BuildOptions) -> str:
    if options.config.numerics == "invariant":
        return FLOAT32
    if options.device_kind != "cpu":
        return options.dtype
    folder, threads = options.checkpoint, options.own.threads
    name = hashlib.sha256(
        "\n".join(
            (
                (folder / "config.json").read_text(),
                processor_field("model name"),
                torch.__version__,
                torch.backends.cpu.get_cpu_capability(),
                str(threads),
            )
        ).encode()
    ).hexdigest()[:16]
    path = options.config.data_dir / FOLDER / f"{options.stage}-{name}.json"
    return record_once(path, lambda: measure_precisions(folder, threads)).chosen


def record_once(path: Path, measure: Callable[[], Mapping[str, float]]) -> PrecisionRecord:
    """Return the record in `path`; measure and write it if there is none. If several processes
    measure at once, the first one's record holds for all. Raises: ConfigError if the file is no
    record, or cannot be written.
    """
    try:
        if not path.exists():
            times = dict(measure())
            record = PrecisionRecord(chosen=choose_precision(times), times_ms=times)
            _write_first(path, msgspec.json.encode(record))
        return msgspec.json.decode(path.read_bytes(), type=PrecisionRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: the recorded precision of a stage cannot be read or written ({error}); "
            "remove the file, or set the precision in the configuration",
            param=f"extra.{PRECISION}",
        ) from error


def _write_first(path: Path, data: bytes) -> None:
    """Write a whole file, unless another process has written it already."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{secrets.token_hex(4)}")
    draft.write_bytes(data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        draft.unlink()
