"""Benchmark of a language model's precisions on a CPU: tokens per second of CPU time, one request
on one thread, beside llama.cpp.

Without a checkpoint, a model of half a billion random weights is measured: the duration of a step
does not depend on the values of weights. A process is started for each precision, and for
llama.cpp. Takes the stage from the graph.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group

from fleet.config import FleetConfig
from fleet.core.errors import ConfigError
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec, Sampling
from fleet.lab.measure.calls import ProcessSettings, call
from fleet.lab.measure.measurement import Context, Measurement, argument
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least
from fleet.lab.report.tables import figures, table_of, titled

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
LLAMA_CPP = "llama.cpp"
NUM_PROMPT, NUM_TOKENS, NUM_RUNS = 30, 65, 3
TARGET_TOKENS_PER_S = 25.0


class DecodeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of answers to a prompt of `NUM_PROMPT` tokens, the best of `NUM_RUNS`. `first_s`:
    time until the first token. `token_s`: time for each later token.
    """

    name: str
    first_s: float
    token_s: float

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.token_s


class PrecisionSpeeds(Result, frozen=True, kw_only=True):
    model: str
    speeds: tuple[DecodeSpeed, ...]
    others_cores: float | None

    def tables(self) -> Iterator[Group]:
        table = table_of("weights", "tokens/s", f"{NUM_PROMPT} tokens of a prompt, s")
        for speed in self.speeds:
            table.add_row(speed.name, *figures(speed.tokens_per_s, speed.first_s))
        yield titled(f"{self.model}: CPU time of one request, one thread", table)

    def targets(self) -> list[Ratio]:
        name = "tokens per second of CPU time, int8"
        return [
            at_least(name, speed.tokens_per_s, TARGET_TOKENS_PER_S, "tokens/s")
            for speed in self.speeds
            if speed.name == "int8"
        ]


def _measure(context: Context) -> PrecisionSpeeds:
    gguf: Path | None = context.options.gguf
    load, one_thread = BackgroundLoad(), ProcessSettings(num_threads=1)
    step = context.steps("precisions", len(PRECISIONS) + (gguf is not None))
    with tempfile.TemporaryDirectory(prefix="fleet-bench-precisions-") as folder:
        config = context.resolve("graph=text", "device=cpu")
        stage = config.graph_declaration().main_stage.name
        model, own = config.checkpoint, ()
        if model == "auto":
            model, own = "half a billion random weights", (f"checkpoint={folder}",)
            call(f"{__name__}:write_model", Path(folder), kind=int)
        speeds: list[DecodeSpeed] = []
        for name in PRECISIONS:
            settings = f"stages.{stage}.threads=1", f"stages.{stage}.extra.precision={name}"
            chosen = context.resolve("graph=text", "device=cpu", *settings, *own)
            function = f"{__name__}:time_precision"
            speeds.append(call(function, chosen, name, kind=DecodeSpeed, settings=one_thread))
            step()
        if gguf is not None:
            function = f"{__name__}:time_llama_cpp"
            speeds.append(call(function, gguf, kind=DecodeSpeed, settings=one_thread))
            step()
    return PrecisionSpeeds(model=model, speeds=tuple(speeds), others_cores=load.cores())


def write_model(folder: Path) -> int:
    """Write a checkpoint with half a billion random weights into `folder`; return the size of its
    weights in bytes.
    """
    from fleet.models.causal_lm.sized import ModelSize, write_sized_checkpoint

    size = ModelSize(
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        intermediate=4864,
        vocabulary=151_936,
    )
    return write_sized_checkpoint(folder, size)


def time_precision(config: FleetConfig, name: str) -> DecodeSpeed:
    """Measure the stage of a language model in this process, which must have one thread."""
    from fleet.lab.measure.engine_answers import answer
    from fleet.worker.main import build_stage

    stage = config.graph_declaration().main_stage.name
    built = build_stage(config, stage, Path(config.checkpoint))

    def run(number: int, num_tokens: int) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        spec = RequestSpec(
            id=RequestId(f"{number}"),
            graph=config.graph,
            prompt_ids=tuple(range(100 + number, 100 + number + NUM_PROMPT)),
            sampling={stage: sampling},
        )
        answer(built, [spec], 1)

    return _time(name, run)


def time_llama_cpp(gguf: Path) -> DecodeSpeed:
    """Measure llama.cpp in this process. Raises: ConfigError if xllamacpp is not installed."""
    try:
        library: Any = import_module("xllamacpp")
    except ImportError as error:
        raise ConfigError(
            "--gguf needs the package xllamacpp: pip install xllamacpp", param="--gguf"
        ) from error
    params = library.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = library.Server(params)

    def run(number: int, num_tokens: int) -> None:
        prompt = list(range(100 + number, 100 + number + NUM_PROMPT))
        body = {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "temperature": 0}
        server.handle_completions({**body, "cache_prompt": False})

    return _time(f"{LLAMA_CPP}, {gguf.name}", run)


def _time(name: str, run: Callable[[int, int], None]) -> DecodeSpeed:
    """Measure `run(number, num_tokens)`, which answers a different prompt for each `number` with
    exactly `num_tokens` tokens.
    """
    run(0, 2)
    first = min(_cpu_s(run, 1 + number, 1) for number in range(NUM_RUNS))
    whole = min(_cpu_s(run, 1 + NUM_RUNS + number, NUM_TOKENS) for number in range(NUM_RUNS))
    return DecodeSpeed(name=name, first_s=first, token_s=(whole - first) / (NUM_TOKENS - 1))


def _cpu_s(run: Callable[[int, int], None], number: int, num_tokens: int) -> float:
    began_s = time.process_time()
    run(number, num_tokens)
    return time.process_time() - began_s


MEASUREMENT = Measurement(
    place=65,
    key="precisions",
    run=_measure,
    option="--precisions",
    help="compare the precisions of a language model's weights on a CPU",
    about={
        "--precisions": "tokens per second of CPU time of a language model in float32, bfloat16, "
        "int8 and int4, one request on one thread, and the CPU time of a short prompt; with "
        "--gguf, of llama.cpp too. Measures --set checkpoint=FOLDER, or half a billion "
        "random weights"
    },
    arguments=(
        argument(
            "--gguf",
            type=Path,
            metavar="FILE",
            help="for --precisions: a model file for llama.cpp (package xllamacpp)",
        ),
    ),
)
