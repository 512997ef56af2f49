"""Rotary embeddings scaled by the length of the text: concurrent requests are answered like each
request alone.

`longrope` has two sets of frequencies, `dynamic` one set for each length beyond the original one.
Prompts stay below the original length, reach it while they are answered, or are longer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import getsource
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers.models
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.core.ids import PREFILL, RequestId, StageName
from fleet.core.request import Sampling
from fleet.drafts.drafters import Drafter, MatchingDrafter, NgramDrafter, Proposer
from fleet.drafts.speculation import Speculation
from fleet.engine.base import NUM_POSITIONS, TOKEN, EngineInput, EngineRequest
from fleet.models.causal_lm.load import load_model
from fleet.models.causal_lm.parts import Parts
from fleet.models.causal_lm.probe import probe
from fleet.models.causal_lm.rope import RECOMPUTING, Rotaries
from tests.capabilities import kv_of, sessions_of
from tests.oracle.test_span_engine import THREE_LAYERS, driven
from tests.oracle.test_text_engine import Family, greedy, write_model
from tests.oracle.twins import speaking_stages
from tests.span_route import TextDriver, single

pytestmark = pytest.mark.one_file_in(6, "engines")

ORIGINAL, NUM_TOKENS, NUM_DRAFTS = 64, 24, 4
FACTORS: dict[str, Any] = {
    "short_factor": [1.0] * 6,
    "long_factor": [1.0 + 3 * i for i in range(6)],
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": ORIGINAL,
    **FACTORS,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
SCALED = {
    "longrope": Family(
        name="Qwen3", more={"max_position_embeddings": 1024, "rope_parameters": LONGROPE}
    ),
    "dynamic": Family(
        name="Llama", more={"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC}
    ),
    "recomputed longrope": Family(
        name="Phi3",
        more={
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": {**FACTORS, "rope_type": "longrope", "rope_theta": 10000.0},
        },
    ),
    "dynamic in some layers": Family(
        name="Gemma3Text",
        more={
            "max_position_embeddings": ORIGINAL,
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "initializer_range": 0.05,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": DYNAMIC,
            },
        },
    ),
}
EXPERTS = Family(
    name="Phimoe",
    more={
        "max_position_embeddings": 1024,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    },
)
FIXED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
"""Rotary embeddings whose frequencies are the same for every length."""


def ids_of(number: int, length: int) -> list[int]:
    return [(37 * at + 101 * number) % 311 + 4 for at in range(length)]


PROMPTS = {
    "short": ids_of(1, 15),
    "crossing": ids_of(2, 55),
    "at the limit": ids_of(3, ORIGINAL),
    "long": ids_of(4, 150),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A checkpoint with scaled rotary embeddings, and the answers that `generate` of a newly loaded
    model gives to each prompt alone.
    """

    folder: Path

    def alone(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        return _alone(self.folder, tuple(prompt), num_tokens)


@cache
def _alone(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return greedy(folder, [list(prompt)], num_tokens, min_new_tokens=num_tokens)[0]


@pytest.fixture(scope="module", params=SCALED)
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scaled:
    family = SCALED[cast(str, request.param)]
    return Scaled(folder=write_model(family, tmp_path_factory.mktemp(family.name)))


def sampling(num_tokens: int = NUM_TOKENS) -> Sampling:
    return Sampling(max_tokens=num_tokens, ignore_eos=True)


def answer_all(driver: TextDriver, prompts: dict[str, list[int]] = PROMPTS) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        driver.submit(name, prompt, sampling())
    driver.run()
    assert not driver.errors
    return driver.tokens


def history_request(name: str, prompt: Sequence[int], drawn: Sequence[int]) -> EngineRequest:
    """Return the request for an answer whose first tokens another engine has sampled."""
    return EngineRequest(
        request_id=RequestId(name),
        sampling=sampling(),
        params={NUM_POSITIONS: str(len(prompt) + NUM_TOKENS)},
        history={TOKEN: np.array(drawn, np.int32)},
    )


def wanted(scaled: Scaled) -> dict[str, list[int]]:
    return {name: scaled.alone(prompt) for name, prompt in PROMPTS.items()}


def test_scaling_changes_the_answers_of_these_models(scaled: Scaled) -> None:
    """Scaling changes the answers of these models; otherwise the other tests would prove
    nothing.
    """
    model: Any = load_model(scaled.folder, "model", torch.float32)
    positions = torch.arange(32)[None]
    more = {"layer_type": "full_attention"} if "gemma" in model.config.model_type else {}
    rotary, rows = model.model.rotary_emb, torch.zeros(1, 1, 1)
    short, _ = rotary(rows, positions, **more)
    beside_long, _ = rotary(rows, torch.cat([positions, torch.tensor([[200]])], 1), **more)
    assert not torch.allclose(short, beside_long[:, :32], atol=0.1)


@pytest.mark.parametrize("chunk", [16, 256])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_requests_together_are_answered_as_each_alone(
    scaled: Scaled, numerics: str, chunk: int
) -> None:
    got = answer_all(single(scaled.folder, numerics=numerics, prefill_chunk_tokens=chunk))
    assert got == wanted(scaled)


def test_logits_do_not_depend_on_a_long_request_beside(scaled: Scaled) -> None:
    options: dict[str, Any] = {"numerics": "invariant", "prefill_chunk_tokens": 16}
    together = single(scaled.folder, **options)
    answer_all(together)
    for name, prompt in PROMPTS.items():
        alone = single(scaled.folder, numerics="invariant")
        answer_all(alone, {name: prompt})
        assert torch.equal(torch.stack(alone.logits[name]), torch.stack(together.logits[name])), (
            name
        )


@pytest.mark.parametrize("num_drawn", [1, 9, 10, 20])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_continued_answer_is_the_one_without_interruption(
    scaled: Scaled, numerics: str, num_drawn: int
) -> None:
    """A continued answer equals the uninterrupted one, where another worker has sampled the first
    tokens, up to or past the original length.
    """
    driver = single(scaled.folder, numerics=numerics, prefill_chunk_tokens=16)
    for name, prompt in PROMPTS.items():
        request = history_request(name, prompt, scaled.alone(prompt)[:num_drawn])
        ids = EngineInput(walk=PREFILL, arrays={"ids": np.array(prompt, np.int32)}, final=True)
        driver.submit_request(request, [ids])
    driver.run()
    assert driver.tokens == wanted(scaled) and not driver.errors


@pytest.mark.parametrize("kv_pages", [15, 40])
def test_evicted_requests_are_answered_as_each_alone(scaled: Scaled, kv_pages: int) -> None:
    driver = single(scaled.folder, kv_pages=kv_pages, prefill_chunk_tokens=16)
    assert answer_all(driver) == wanted(scaled)
    driver.engine.pool.check()
    assert driver.engine.stats().kv.pages_used == 0


@pytest.mark.parametrize("name", THREE_LAYERS)
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_divided_model_answers_as_each_alone(scaled: Scaled, name: str, numerics: str) -> None:
    with driven(
        scaled.folder, THREE_LAYERS[name], numerics=numerics, prefill_chunk_tokens=16
    ) as driver:
        assert answer_all(driver) == wanted(scaled)


def test_divided_model_answers_equally_after_the_loss_of_a_worker(scaled: Scaled) -> None:
    with driven(
        scaled.folder, THREE_LAYERS["forward"], numerics="invariant", prefill_chunk_tokens=16
    ) as driver:
        for name, prompt in PROMPTS.items():
            driver.submit(name, prompt, sampling())
        driver.run(lambda: len(driver.tokens["crossing"]) >= 12)
        assert driver.route is not None
        driver.route.worker_at[0].kill()
        driver.run()
        assert driver.tokens == wanted(scaled) and not driver.errors


def test_next_turn_reuses_only_rows_with_its_own_scaling(scaled: Scaled) -> None:
    driver = single(scaled.folder, numerics="invariant", prefill_chunk_tokens=16)
    text, reused = ids_of(5, 20), list[int]()
    for turn in range(6):
        before = driver.engine.stats().kv.rows_reused
        driver.submit(f"turn {turn}", text, sampling(10), session="talk")
        driver.run()
        reused.append(driver.engine.stats().kv.rows_reused - before)
        assert driver.tokens[f"turn {turn}"] == scaled.alone(text, 10), (
            f"{len(text)} tokens of prompt"
        )
        text = [*text, *driver.tokens[f"turn {turn}"], *ids_of(turn, 5)]
    assert reused[1] == 29, "prompt and answer of the first turn, but for the last token"
    assert reused[2] == 44
    assert reused[3] == 0, "the first turn longer than the original length"


@pytest.mark.parametrize("order", [("short", "long"), ("long", "short"), ("crossing", "long")])
def test_rows_of_a_longer_text_are_not_reused_for_a_shorter_one(
    scaled: Scaled, order: tuple[str, str]
) -> None:
    """Rows of a longer text are not reused for a shorter one: two texts of a session with the same
    beginning.
    """
    text = PROMPTS["long"]
    lengths = {"short": 40, "crossing": 58, "long": 150}
    driver = single(scaled.folder, numerics="invariant")
    for name in order:
        driver.submit(name, text[: lengths[name]], sampling(), session="talk")
        driver.run()
        assert driver.tokens[name] == scaled.alone(text[: lengths[name]])


class KnownAnswers(MatchingDrafter):
    """Drafter double that proposes tokens of known answers; every third token is wrong if
    `errs`.
    """

    def __init__(self, answers: dict[tuple[int, ...], list[int]], *, errs: bool) -> None:
        super().__init__()
        self._answers, self._errs = answers, errs

    def open(self, prompt_ids: Sequence[int]) -> Proposer:
        return KnownAnswer(self._answers[tuple(prompt_ids)], errs=self._errs)


class KnownAnswer(Proposer):
    def __init__(self, answer: Sequence[int], *, errs: bool) -> None:
        self._answer = answer
        self._errs = errs
        self._num_seen = 0

    def add(self, tokens: Sequence[int]) -> None:
        self._num_seen += len(tokens)

    def propose(self, most: int) -> Sequence[int]:
        coming = range(self._num_seen, min(self._num_seen + most, len(self._answer)))
        return [(self._answer[at] + (self._errs and at % 3 == 0)) % 300 for at in coming]


@pytest.mark.parametrize("drafter", ["right", "partly right", "ngram"])
@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_drafts_do_not_change_the_answers(scaled: Scaled, numerics: str, drafter: str) -> None:
    answers = {tuple(prompt): scaled.alone(prompt) for prompt in PROMPTS.values()}
    known: Drafter = (
        NgramDrafter() if drafter == "ngram" else KnownAnswers(answers, errs=drafter != "right")
    )
    driver = single(scaled.folder, numerics=numerics, prefill_chunk_tokens=16)
    driver.engine.speculation = Speculation(
        {"known": known}, "known", NUM_DRAFTS, follows_times=False
    )
    assert answer_all(driver) == wanted(scaled)
    assert drafter == "ngram" or sum(driver.engine.speculation.figures().accepted) > 20


def test_scaled_embeddings_with_experts_are_answered_as_each_alone(tmp_path: Path) -> None:
    scaled = Scaled(folder=write_model(EXPERTS, tmp_path))
    assert answer_all(single(scaled.folder, prefill_chunk_tokens=16)) == wanted(scaled)


@pytest.mark.parametrize("form", FIXED)
def test_frequencies_that_are_fixed_need_no_scaling(form: str, tmp_path: Path) -> None:
    parameters = {"rope_theta": 10000.0, **FIXED[form]}
    family = Family(
        name="Llama", more={"max_position_embeddings": 256, "rope_parameters": parameters}
    )
    scaled = Scaled(folder=write_model(family, tmp_path))
    driver = single(scaled.folder, prefill_chunk_tokens=16)
    assert answer_all(driver) == wanted(scaled)
    program: Any = driver.engine.program
    assert program.rope is None


def test_attention_that_is_scaled_by_position_is_answered_as_each_alone(tmp_path: Path) -> None:
    parameters = {"rope_theta": 10000.0, **FIXED["yarn"], "llama_4_scaling_beta": 0.5}
    more = {"max_position_embeddings": 256, "rope_parameters": parameters}
    scaled = Scaled(folder=write_model(Family(name="Ministral3", more=more), tmp_path))
    assert answer_all(single(scaled.folder, prefill_chunk_tokens=16)) == wanted(scaled)


def test_unknown_scaling_by_length_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown kind of scaling by length is refused by name: one of a later `transformers`, whose
    frequencies depend on the longest position.
    """
    folder = write_model(Family(name="Llama", more={"max_position_embeddings": 256}), tmp_path)
    rotary: Any = import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding
    forward = rotary.forward

    def scaled_by_longest(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = forward(self, x, position_ids)
        return cos * (1 + position_ids.max() / 50), sin

    monkeypatch.setattr(rotary, "forward", scaled_by_longest)
    named = r"other positions of the pass .*rope_type 'default'.*; give a checkpoint of another"
    with pytest.raises(ConfigError, match=named) as caught:
        single(folder)
    assert "\n" not in caught.value.message


def test_scaling_that_rows_do_not_follow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaling that the engine's rows do not follow is refused: the trial at the start runs rows
    beyond the original length beside others.
    """
    folder = write_model(SCALED["longrope"], tmp_path)
    model: Any = load_model(folder, "qwen3", torch.float32)
    probe(model.config, Parts(model), torch.device("cpu"))
    monkeypatch.setattr(Rotaries, "add", lambda *_: None)
    whole: Any = load_model(folder, "qwen3", torch.float32)
    with pytest.raises(ValueError, match="rope_type 'longrope'"):
        probe(whole.config, Parts(whole), torch.device("cpu"))


def test_architectures_that_compute_a_text_again_are_known() -> None:
    """Architectures whose `generate` drops its cache where the text reaches the original length,
    and computes the text again, are known to Fleet.
    """
    found: set[str] = set()
    for module in iter_modules(transformers.models.__path__):
        path = Path(transformers.models.__path__[0]) / module.name / f"modeling_{module.name}.py"
        text = path.read_text() if path.exists() else ""
        if "past_length <= self.config.original_max_position_embeddings" in text:
            found.add(module.name)
    assert found == RECOMPUTING
    phi3: Any = transformers.Phi3ForCausalLM
    assert "original_max_position_embeddings" in getsource(phi3.prepare_inputs_for_generation)


@pytest.mark.parametrize("form", [DYNAMIC, LONGROPE], ids=lambda form: form["rope_type"])
def test_thinker_that_is_scaled_by_length_is_refused_by_name(
    form: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A Thinker scaled by length is refused by name, since it reads its rotary embeddings from a
    table by position.
    """
    for path in tiny_checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    text = config["thinker_config"]["text_config"]
    half = text["head_dim"] // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    text["rope_scaling"] |= {**form, **factors}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"rope_type '{form['rope_type']}'.*use 'default'"):
        speaking_stages(tmp_path, stages=(StageName("thinker"),))


@pytest.mark.parametrize("num_drawn", [1, 8, 9, 10, 11, 20])
def test_rows_of_another_engine_are_used_only_with_equal_scaling(
    scaled: Scaled, num_drawn: int
) -> None:
    """Rows of another engine, exported after `num_drawn` sampled tokens, are used only with equal
    scaling. 10 tokens make the text longer than the original length.
    """
    prompt = PROMPTS["crossing"]
    source = single(scaled.folder, numerics="invariant")
    source.submit("crossing", prompt, sampling())
    source.run(lambda: len(source.tokens["crossing"]) >= num_drawn)
    blocks = kv_of(source.engine).export_blocks(RequestId("crossing"))
    drawn = source.tokens["crossing"]
    target = single(scaled.folder, numerics="invariant")
    ids = EngineInput(walk=PREFILL, arrays={"ids": np.array(prompt, np.int32)}, final=True)
    target.submit_request(history_request("crossing", prompt, drawn), [ids])
    is_used = blocks is not None and kv_of(target.engine).import_blocks(
        RequestId("crossing"), blocks
    )
    assert is_used or num_drawn >= 10
    target.run()
    assert target.tokens["crossing"] == scaled.alone(prompt)


@pytest.mark.parametrize("length", [20, 50, 80])
def test_saved_session_continues_with_the_scaling_of_its_next_turn(
    scaled: Scaled, length: int
) -> None:
    source, target = (single(scaled.folder, numerics="invariant") for _ in range(2))
    first = ids_of(6, length)
    source.submit("first", first, sampling(10), session="talk")
    source.run()
    sessions_of(source.engine).begin_save("talk")
    (copied,) = sessions_of(source.engine).take_copied()
    assert copied.saved is not None
    sessions_of(target.engine).begin_load("talk", copied.saved)
    assert [each.error for each in sessions_of(target.engine).take_copied()] == [None]
    text = [*first, *source.tokens["first"], *ids_of(7, 8)]
    target.submit("next", text, sampling(), session="talk")
    target.run()
    assert target.tokens["next"] == scaled.alone(text)
    assert length > 20 or target.engine.stats().kv.rows_reused == length + 9
