"""Runs the scripts of third-party clients against a gateway of a fake fleet, whose model answers
what each request asks for: a call, JSON, an edit, or a sentence. Knows no client by name.
"""

import json
import os
import subprocess
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.config.schema import FleetConfig, Limits, WebConfig
from fleet.core.request import RequestSpec
from fleet.processing import load_frontend
from fleet.processing.tokenizer import load_tokenizer
from tests.clients.environments import SCRIPTS, ThirdPartyClient, environment_of, node_folder
from tests.tool_template import ARGUMENTS, call_text, write_tool_template
from tests.web.checkpoint import write_frontend_files
from tests.web.conftest import Loaded, serving
from tests.web.fake_client import FakeClient, FakeStream, Script
from tests.web.realtime.speech_samples import QUESTION, RATE_HZ, speech

SAID, HEARD = Script().text, "What day comes after Monday?"
MODEL, RUN_S = "omni", 900
USER = "<|im_start|>user"
EDITS = "*SEARCH/REPLACE block*"
"""A form of edits, as a programming assistant's prompt names it."""
EDIT = """\
hello.py
```
<<<<<<< SEARCH
print("hello")
=======
print("goodbye")
>>>>>>> REPLACE
```
"""
"""An edit of this form."""
LATER_CALLS = ("final", "transfer")
"""Beginnings of the names of functions that a client wants called after the others' results."""
RESULTS = ("<tool_response>", "Observation:")
"""Beginnings of results of functions: of the chat template, and of clients that send them as a
user's message.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureOutcome:
    """Outcome of one feature. `why`: the client's error, empty if `ok`."""

    feature: str
    ok: bool
    why: str


class ObligingFleet(FakeClient):
    """A control plane in memory whose model answers as each request asks it to."""

    def start(self, spec: RequestSpec, blob: bytes | None) -> FakeStream:
        prompt = self.tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)
        text = EDIT if EDITS in prompt else answer_to(spec, prompt.rpartition(USER)[2])
        self.script = Script(text=text, heard=HEARD)
        return super().start(spec, blob)


def answer_to(spec: RequestSpec, last: str) -> str:
    """Return a call of a function, JSON that follows the rule of the answer, or a sentence.

    `last`: end of the prompt from the user's last message, or from results of functions. A function
    named as in `LATER_CALLS` is called after results, or if there is no other function.
    """
    names = spec.tools.names if spec.tools is not None and spec.kind != "voice" else ()
    later = [name for name in names if name.startswith(LATER_CALLS)]
    first = [name for name in names if name not in later]
    if first and not any(mark in last for mark in RESULTS):
        return call_text(first[0])
    if later:
        return call_text(later[0], arguments_of(later[0]))
    rules = [sampling.constraint for sampling in spec.sampling.values()]
    bound = any(rule is not None and rule.kind == "json" for rule in rules)
    return ARGUMENTS if bound else SAID


def arguments_of(name: str) -> str:
    if name.startswith("transfer"):
        return "{}"
    return json.dumps({"answer": SAID}) if name == "final_answer" else ARGUMENTS


def load(folder: Path) -> Loaded:
    """Write a tiny checkpoint whose template writes tools; prompts of agents fit its limits."""
    checkpoint = write_tool_template(write_frontend_files(folder / "checkpoint"))
    config = FleetConfig(
        limits=Limits(max_prompt_tokens=60_000),
        web=WebConfig(model_name=MODEL),
        data_dir=folder / "data",
    )
    frontend = load_frontend(config.graph_declaration().frontend, checkpoint, config.limits)
    return Loaded(checkpoint=checkpoint, config=config, frontend=frontend)


@contextmanager
def gateway_of(loaded: Loaded) -> Iterator[str]:
    """Run a gateway of the obliging fleet; yield its URL."""
    graph, tokenizer = loaded.config.graph_declaration(), load_tokenizer(loaded.checkpoint)
    with serving(loaded, client=ObligingFleet(graph, tokenizer)) as gateway:
        yield gateway.url


def write_question(path: Path) -> Path:
    """Write a spoken question as a WAV file: 24 kHz, mono, 16 bit."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(speech(QUESTION))
    return path


def results_of(
    client: ThirdPartyClient, url: str, question: Path, home: Path, tokenizer: Path
) -> list[FeatureOutcome]:
    """Run the client's script; return a result for each feature that it reported.

    `home`: empty folder that the client may take for the user's home. `tokenizer`: folder of the
    model's tokenizer, by which load tools count.
    """
    environment = environment_of(client.requirement)
    if client.path.suffix == ".mjs":
        command = [node_folder() / "bin" / "node", client.path, environment]
    else:
        command = [environment / "bin" / "python", SCRIPTS / "drive.script", client.path]
    # Unlike subprocess, it ends the programs that the script started too, and keeps its results.
    bounded = ["timeout", str(RUN_S), *command]
    done = subprocess.run(
        [*bounded, url, MODEL, question, tokenizer],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={
            "PATH": os.defpath,
            "HOME": str(home),
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    return [FeatureOutcome(**json.loads(line)) for line in lines]
