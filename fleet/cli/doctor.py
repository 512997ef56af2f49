"""`fleet doctor`: what the deployment exposes, and what of it would be refused at start. Starts and opens nothing."""

import typer

from fleet.cli.deployment import open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.config.safety import GATEWAY_CHECKS, Check, findings

CHECKS: tuple[Check, ...] = GATEWAY_CHECKS
"""In the order they are shown."""


def doctor(config: ConfigFile = None, set_: Overrides = None) -> None:
    """Check what the deployment exposes: a line each, OK, REFUSED (with the remedy) or PERMITTED by a setting.

    The exit status is 1 if anything would be refused at start.

    Example: fleet doctor --set web.host=0.0.0.0
    """
    deployment = open_deployment(config, set_)
    found = list(findings(CHECKS, deployment.config, deployment.settings))
    verdict_width = max(len(finding.verdict) for finding in found)
    subject_width = max(len(finding.subject) for finding in found)
    for finding in found:
        found_out = finding.refusal if finding.refused else finding.value
        print(f"{finding.verdict:{verdict_width}}  {finding.subject:{subject_width}}  {found_out}")
    if any(finding.refused for finding in found):
        raise typer.Exit(1)
