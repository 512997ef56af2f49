"""Sampling defaults of a checkpoint: its generation_config.json in the field names of `Sampling`.
Knows no stage.
"""

from collections.abc import Mapping
from pathlib import Path

from fleet.core.errors import ConfigError
from fleet.processing.template import read_json

FILE = "generation_config.json"
_FIELD_OF = {name: name for name in ("temperature", "top_k", "top_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}


def read_checkpoint_sampling(checkpoint: Path, prefix: str = "") -> Mapping[str, float | int]:
    """Return the sampling defaults in generation_config.json whose keys begin with `prefix` (such
    as "talker_" in "talker_temperature"); a `do_sample` of false becomes temperature 0.

    Raises: ConfigError naming the file and the key if a value is not a number.
    """
    config = read_json(checkpoint / FILE)
    fields: dict[str, float | int] = {}
    for key, name in _FIELD_OF.items():
        value = config.get(prefix + key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{checkpoint / FILE}: {prefix + key} must be a number, not {value!r}",
                param="checkpoint",
            )
        fields[name] = value
    if config.get(prefix + "do_sample") is False:
        fields["temperature"] = 0.0
    return fields
