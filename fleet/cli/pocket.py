"""`fleet pocket`: train and evaluate the small model that ships with Fleet; implemented in
`fleet.lab.pocket`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fleet.config.settings import read_settings
from fleet.core.errors import ConfigError

app = typer.Typer(
    name="pocket",
    no_args_is_help=True,
    help="Train and evaluate Pocket, the small model that ships with Fleet.",
)


@app.command()
def train(
    steps: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STEP]...", help="Only these steps of the recipe."),
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Folder of data and trained parts, from which a run resumes.")
    ] = Path(".fleet/pocket"),
    device: Annotated[
        str, typer.Option(help="Device of the trainings: cpu, cuda, cuda:1.")
    ] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of a training.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes that synthesize speech.")] = 1,
    share: Annotated[
        float, typer.Option(help="Share of the steps of each training: 0.01 tries the recipe.")
    ] = 1.0,
    start: Annotated[
        Path | None, typer.Option(help="An exported folder whose weights the trainings start from.")
    ] = None,
) -> None:
    """Train Pocket from scratch: hours on two CPU cores, less on a GPU. Training can be stopped at
    any time; the same command resumes.

    Named steps run alone; `fleet pocket steps` lists them in order. Independent steps can run at
    the same time, one command each. The last step writes a folder for `--set checkpoint=DIR`.

    Example: fleet pocket train --threads 2 --workers 2
    """
    with _pocket_extra():
        from fleet.lab.pocket import recipe
    options = recipe.RecipeOptions(
        folder=work, device=device, threads=threads, workers=workers, share=share, start=start
    )
    recipe.run_steps(options, steps or [])


@app.command(name="steps")
def list_steps() -> None:
    """List the steps of the recipe in order, with the steps that each depends on."""
    with _pocket_extra():
        from fleet.lab.pocket.recipe import STEPS
    for name, step in STEPS.items():
        print(
            f"{name:<11} {step.description}"
            + (f" (after {', '.join(step.after)})" if step.after else "")
        )


@app.command(name="eval")
def evaluate(
    url: Annotated[
        str, typer.Option(help="The gateway of the fleet to evaluate.")
    ] = "http://localhost:8000",
    parts: Annotated[
        list[str] | None, typer.Option("--part", help="Only this part; can be repeated.")
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(help="Number of questions in each part. Default: the full numbers."),
    ] = None,
    own_sampling: Annotated[
        bool, typer.Option(help="Sample as the checkpoint's defaults say, not greedily.")
    ] = False,
    sounds: Annotated[
        Path | None, typer.Option(help="Folder to write each spoken answer to, as WAV.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures and answers to FILE.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot to FILE.")] = None,
) -> None:
    """Evaluate Pocket on a running fleet: answers to held-out questions, typed and spoken, its
    speech, and its speed.

    The parts: typed, speech_out, speech_in, speed. All four take about a quarter of an hour on two
    cores.

    Example: fleet pocket eval --part typed --questions 100 --json pocket.json
    """
    with _pocket_extra():
        from rich.console import Console

        from fleet.lab.pocket.judge.options import options_of
        from fleet.lab.pocket.judge.report import draw, show, write_report
        from fleet.lab.pocket.judge.run import run
    options = options_of(
        parts or (),
        questions,
        own_sampling=own_sampling,
        sounds=sounds,
        api_key=read_settings().api_key,
    )
    report = run(url, options)
    show(report, Console())
    if json:
        write_report(report, json)
    if png:
        draw(report, png)


@app.command()
def demo(
    out_dir: Annotated[
        Path,
        typer.Argument(metavar="OUT_DIR", help="Folder of the files; created if it is missing."),
    ],
    url: Annotated[
        str, typer.Option(help="The gateway of a running fleet.")
    ] = "http://localhost:8000",
) -> None:
    """Send three questions to a running fleet, one of them spoken; write the answers as three WAV
    files and one picture.

    Example: fleet pocket demo recordings
    """
    with _pocket_extra():
        from fleet.lab.pocket.judge.demo import demonstrate
    demonstrate(url, out_dir, print, api_key=read_settings().api_key)


@contextmanager
def _pocket_extra() -> Iterator[None]:
    """Return a context in which an import of a missing library raises a ConfigError that names the
    extra `pocket`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; run: pip install 'fleet-serving[pocket]'",
            param="pocket",
        ) from error
