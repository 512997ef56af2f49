"""`fleet scale`: order how many workers a role has."""

from typing import Annotated

import typer

from fleet.cli.deployment import open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.errors import BadInput

ORDERED_BY = "fleet scale"


def scale(
    orders: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="Numbers of workers, 0 to 64.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before a role is left without a worker.")
    ] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Order how many workers of a role accept tasks. The running `fleet up` starts them, or lets
    workers finish their tasks and then stops them. If several `fleet up` run, the next worker is
    started by the one with the fewest workers of the role, and stopped by the one with the most.

    The number counts until the last `fleet up` of the fleet ends; the configuration stays as it is.

    Examples:

      fleet scale lm=3

      fleet scale asr=2 lm=2
    """
    from fleet.control import scripts
    from fleet.control.connect import run, text
    from fleet.control.operations import check_managed, check_scale

    deployment = open_deployment(config, set_)
    checked = [
        (check_scale(deployment.config, role, number), number)
        for role, number in map(_parse_order, orders)
    ]
    for role, number in checked:
        if number == 0 and not yes:
            question = f"Without a worker of {role}, requests that need it are refused. Continue?"
            typer.confirm(question, abort=True)
    with deployment.connect() as client:
        for role, number in checked:
            check_managed(role, text(run(client, scripts.scale(role, number, ORDERED_BY))))
            print(f"{role}: {number} wanted")


def _parse_order(argument: str) -> tuple[str, int]:
    role, _, number = argument.partition("=")
    if not role or not (number.isascii() and number.isdecimal() and len(number) < 9):
        raise BadInput(f"{argument[:80]!r} is not ROLE=N; write for example lm=3")
    return role, int(number)
