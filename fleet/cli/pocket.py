"""`fleet pocket`: make the local model, and find out what it can. The work is `fleet.pocket`'s."""

from pathlib import Path
from typing import Annotated

import typer

from fleet.config.settings import read_settings
from fleet.core.errors import ConfigError

app = typer.Typer(name="pocket", no_args_is_help=True, help="Make and judge Pocket, the small model that ships with Fleet.")


@app.command()
def train(
    steps: Annotated[list[str] | None, typer.Argument(metavar="[STEP]...", help="Only these steps of the recipe.")] = None,
    work: Annotated[Path, typer.Option(help="Data and trained parts; a run goes on from what is here.")] = Path(".fleet/pocket"),
    device: Annotated[str, typer.Option(help="Where the trainings compute: cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of a training.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes that speak and record.")] = 1,
    share: Annotated[float, typer.Option(help="Of every training's steps: 0.01 tries the recipe out.")] = 1.0,
    start: Annotated[Path | None, typer.Option(help="A folder made before, whose weights the trainings begin with.")] = None,
) -> None:
    """Make Pocket from nothing: hours on two CPU cores, less on a GPU. Stop it at any time: the same command goes on.

    A step's name runs it alone; `fleet pocket steps` lists them in order. Those that share nothing may run at the same time, one
    command each. The last one writes the folder that a deployment's `checkpoint` names.

    Example: fleet pocket train --threads 2 --workers 2
    """
    try:
        from fleet.pocket import recipe
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    options = recipe.RecipeOptions(folder=work, device=device, threads=threads, workers=workers, share=share, start=start)
    recipe.make(options, steps or [])


@app.command(name="steps")
def list_steps() -> None:
    """The steps of the recipe in order, and what each waits for."""
    try:
        from fleet.pocket.recipe import STEPS
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    for name, step in STEPS.items():
        print(f"{name:<11} {step.what}" + (f" (after {', '.join(step.after)})" if step.after else ""))


@app.command(name="eval")
def evaluate(
    url: Annotated[str, typer.Option(help="The fleet to judge; `fleet up` starts one.")] = "http://localhost:8000",
    parts: Annotated[list[str] | None, typer.Option("--part", help="Only this part; may be given many times.")] = None,
    questions: Annotated[int | None, typer.Option(help="Ask so many in every part, instead of the full numbers.")] = None,
    own_sampling: Annotated[bool, typer.Option(help="As the checkpoint draws by itself, not greedily.")] = False,
    sounds: Annotated[Path | None, typer.Option(help="A folder for every spoken answer as WAV.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Every figure and every answer.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The picture.")] = None,
) -> None:
    """Judge a running fleet's Pocket: held-out questions typed and spoken, its speech listened to, its speed.

    The parts: typed, speech_out, speech_in, speed. All of it takes about a quarter of an hour on two cores.

    Example: fleet pocket eval --part typed --questions 100 --json pocket.json
    """
    try:
        from rich.console import Console

        from fleet.pocket.judge.options import options_of
        from fleet.pocket.judge.plot import draw
        from fleet.pocket.judge.report import write_report
        from fleet.pocket.judge.run import run
        from fleet.pocket.judge.show import show
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    options = options_of(parts or (), questions, own_sampling=own_sampling, sounds=sounds, api_key=read_settings().api_key)
    report = run(url, options)
    show(report, Console())
    if json:
        write_report(report, json)
    if png:
        draw(report, png)


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Where the files go; made if it is not there.")],
    url: Annotated[str, typer.Option(help="The fleet to ask; `fleet up` starts one.")] = "http://localhost:8000",
) -> None:
    """Hear and see Pocket: three questions to a running fleet, one of them spoken, as three WAV files and one picture.

    Example: fleet pocket demo sounds
    """
    try:
        from fleet.pocket.judge.demo import demonstrate
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    demonstrate(url, out_dir, print, api_key=read_settings().api_key)


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{error.name} is not installed; run: pip install 'fleet-serving[pocket]'", param="pocket")
