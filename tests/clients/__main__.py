"""`python -m tests.clients [--only NAME ...]`: install third-party clients, run their scripts, and
write the page of results. With `--only`, the named clients are run, and other rows stay.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.clients.environments import CLIENTS, ThirdPartyClient, install
from tests.clients.page import write_page
from tests.clients.running import FeatureOutcome, gateway_of, load, results_of, write_question


def run(clients: Sequence[ThirdPartyClient], folder: Path) -> dict[str, list[FeatureOutcome]]:
    """Run the scripts one after another, and print each result as a JSON line."""
    question = write_question(folder / "question.wav")
    home = folder / "home"
    home.mkdir()
    results: dict[str, list[FeatureOutcome]] = {}
    for client in clients:
        install(client.requirement)
        loaded = load(folder / client.name)
        with gateway_of(loaded) as url:
            results[client.name] = results_of(client, url, question, home, loaded.checkpoint)
        for result in results[client.name]:
            print(json.dumps({"client": client.name, **asdict(result)}), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        write_page(run([client for client in CLIENTS if client.name in only], Path(folder)))


if __name__ == "__main__":
    main()
