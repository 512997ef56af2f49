"""A fleet of the `text` graph on vLLM, and the `openai` client with which the tests ask it."""

from openai import AsyncOpenAI

from tests.e2e.fleets import ProcessFleet
from tests.support import REPO

TEXT_FILE = ("--config", str(REPO / "configs" / "text.yaml"))
ON_VLLM = (
    "checkpoint=tiny",
    "engine=vllm",
    "device=cpu",
    "transfer.kind=redis",
    "web.port=0",
    "stages.lm.vllm.kv_mib=64",
)
SPLIT = (
    "stages.lm.split.prefill.replicas=1",
    "stages.lm.split.decode.replicas=1",
    "transfer.kind=nixl",
)


def openai_client(fleet: ProcessFleet) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", timeout=120, max_retries=0)
