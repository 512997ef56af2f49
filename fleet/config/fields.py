"""Types of the values in a deployment file, with the limits of single values."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from fleet.config import values
from fleet.config.values import Number, Whole

Text = Annotated[str, BeforeValidator(values.text)]
Folder = Annotated[Path, BeforeValidator(values.folder)]
Device = Annotated[str, BeforeValidator(values.device)]
Devices = Annotated[str | tuple[str, ...], BeforeValidator(values.devices)]
Host = Annotated[str, BeforeValidator(values.host)]
Address = Annotated[str, BeforeValidator(values.address)]
Endpoint = Annotated[str, BeforeValidator(values.endpoint)]
Origin = Annotated[str, BeforeValidator(values.origin)]
ServiceUrl = Annotated[str, BeforeValidator(values.service_url)]
Url = Annotated[str, BeforeValidator(values.url)]
Network = Annotated[str, BeforeValidator(values.network)]
Port = Annotated[int, BeforeValidator(values.port)]
Span = Annotated[str, BeforeValidator(values.span_or_auto)]
Switch = Annotated[bool, BeforeValidator(values.switch)]
Share = Annotated[float, Number(0, 1, above=True)]
Mebibytes = Annotated[int, Whole(1, 1024 * 1024)]
Items = Annotated[int, Whole(1, 1_000_000)]
"""Counts of tokens, frames or chunks; a count above a million is treated as a mistake."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
