"""Log probabilities of an answer's tokens: compared with the model's own forward pass, in mixed
batches, from any token of the log, with drafts, and after the death of a worker.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fleet.core.chunk import LOGPROBS, TOP_IDS, Chunk, WireTensor
from fleet.core.errors import ChunkOrderError
from fleet.core.ids import EdgeName, RequestId, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import Arrays
from fleet.graphs import get_graph
from fleet.lab.measure.twin import SlowTwin
from fleet.stages.base import BuiltStage
from tests.harness import answer, answer_disturbed, assert_same, gateway, in_step, thread_fleet
from tests.oracle.oracle import from_pretrained
from tests.oracle.test_text_engine import FAMILIES, LM, PROMPTS, TEXT, stage, write_model
from tests.web.build import build

pytestmark = pytest.mark.one_file_in(4, "engines of one process")

MAX_TOKENS = 12
SAMPLINGS = [
    Sampling(max_tokens=MAX_TOKENS, top_logprobs=3),
    Sampling(max_tokens=MAX_TOKENS),
    Sampling(max_tokens=MAX_TOKENS, temperature=1.3, top_k=40, seed=5, top_logprobs=0),
    Sampling(
        max_tokens=MAX_TOKENS,
        temperature=0.8,
        seed=6,
        repetition_penalty=1.4,
        logit_bias=((9, 8.0), (11, -8.0)),
        top_logprobs=20,
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILIES[0], tmp_path_factory.mktemp("lm"))


def spec_of(prompt: Sequence[int], sampling: Sampling, given: Sequence[int] = ()) -> RequestSpec:
    return RequestSpec(
        id=new_request_id(),
        graph="text",
        prompt_ids=tuple(prompt),
        outputs=(TEXT,),
        sampling={LM: sampling},
        given=tuple(given),
    )


def joined(chunks: Sequence[Arrays]) -> dict[str, np.ndarray]:
    names = {name for chunk in chunks for name in chunk}
    return {name: np.concatenate([c[name] for c in chunks if name in c]) for name in names}


def told(built: BuiltStage, specs: Sequence[RequestSpec]) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each answer: token ids, and log probabilities where they are asked."""
    answers = SlowTwin(get_graph("text"), {LM: built}).run(specs)
    return [joined(answers[spec.id][TEXT]) for spec in specs]


def expected(folder: Path, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """Return the log probabilities of every id at the place of each of an answer's `ids`."""
    model = from_pretrained("AutoModelForCausalLM", folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


JOBS = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_logprobs_are_those_of_the_model_before_all_settings(folder: Path, numerics: str) -> None:
    built = stage(folder, numerics=numerics, speculation={"drafter": "off"})
    made = told(built, [spec_of(*job) for job in JOBS])
    for (prompt, sampling), arrays in zip(JOBS, made, strict=True):
        if sampling.top_logprobs is None:
            assert set(arrays) == {"ids"}
            continue
        ids, num_top = arrays["ids"], sampling.top_logprobs
        wanted = expected(folder, prompt, ids.tolist())
        best = wanted.topk(num_top, -1)
        own = wanted[torch.arange(len(ids)), torch.from_numpy(ids).long()]
        np.testing.assert_allclose(arrays[LOGPROBS][:, 0], own.numpy(), atol=2e-4)
        np.testing.assert_allclose(arrays[LOGPROBS][:, 1:], best.values.numpy(), atol=2e-4)
        assert arrays[TOP_IDS].tolist() == best.indices.tolist()
    assert any((arrays[LOGPROBS][:, 0] < -3).any() for arrays in made if LOGPROBS in arrays)


def same(arrays: dict[str, np.ndarray], wanted: dict[str, np.ndarray], first: int = 0) -> bool:
    return set(arrays) == set(wanted) and all(
        np.array_equal(arrays[name], wanted[name][first if name != "ids" else 0 :])
        for name in wanted
    )


def test_logprobs_are_independent_of_the_batch_of_drafts_and_of_the_owner(folder: Path) -> None:
    plain = stage(folder, numerics="invariant", speculation={"drafter": "off"})
    alone = [told(plain, [spec_of(*job)])[0] for job in JOBS]
    drafted = stage(folder, numerics="invariant", speculation={"drafter": "suffix"})
    for built in (plain, drafted, drafted):  # at last, earlier answers are drafts
        for made, wanted in zip(told(built, [spec_of(*job) for job in JOBS]), alone, strict=True):
            assert same(made, wanted)
    figures = drafted.engine.stats().speculation
    assert figures is not None and sum(figures.accepted) > 0
    for (prompt, sampling), wanted in zip(JOBS[:4], alone, strict=False):
        ids = wanted["ids"].tolist()
        specs = [spec_of(prompt, sampling, ids[:place]) for place in range(len(ids))]
        for place, made in enumerate(told(plain, specs)):
            assert same(made, wanted, first=place)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_logprobs_are_equal_after_the_death_of_the_worker(
    redis_url: str, text_checkpoint: Path, temperature: float
) -> None:
    ways = ("engine=torch", "device=cpu", "dtype=float32", "numerics=invariant")
    sampling = Sampling(
        max_tokens=16, ignore_eos=True, temperature=temperature, seed=3, top_logprobs=4
    )
    in_text = in_step(get_graph("text"))
    with thread_fleet(redis_url, *ways, *in_text, checkpoint=text_checkpoint) as fleet:
        async with gateway(fleet) as client:
            wanted = await answer(client, spec_of(PROMPTS[0], sampling))
            assert len(wanted[TEXT]) == 16 * (1 + 5 + 4)
            for index in (0, 1, 7):
                spec = spec_of(PROMPTS[0], sampling)

                def kill(_: EdgeName, at: int, killed: str = spec.id, index: int = index) -> None:
                    if at == index:
                        dying = fleet.owner(RequestId(killed), LM)
                        fleet.add_worker(LM)
                        fleet.kill(dying)

                assert_same(await answer_disturbed(client, spec, None, kill), wanted)


def chunk_of(**arrays: np.ndarray) -> Chunk:
    tensors = {
        name: WireTensor(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())
        for name, array in arrays.items()
    }
    return build(Chunk, request=RequestId("r"), edge=TEXT, epoch=1, tensors=tensors, first_row=5)


def test_chunk_is_cut_in_all_its_tensors_or_not_at_all() -> None:
    ids, logprobs = np.arange(4, dtype="<i4"), np.arange(12, dtype="<f4").reshape(4, 3)
    none = np.zeros((4, 0), "<i4")
    rest = chunk_of(ids=ids, logprobs=logprobs, top_ids=none).without(3)
    assert rest.first_row == 8 and rest.num_rows == 1
    assert rest.tensors["ids"].data == ids[3:].tobytes()
    assert rest.tensors["logprobs"].shape == (1, 3) and rest.tensors["top_ids"].shape == (1, 0)
    assert rest.tensors["logprobs"].data == logprobs[3:].tobytes()
    with pytest.raises(ChunkOrderError, match="cannot be cut"):
        chunk_of(ids=ids, text=np.zeros(9, np.uint8)).without(3)
