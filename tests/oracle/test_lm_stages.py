"""The language stages (Thinker, Talker): the weights they load, their output on each edge, and the
end of an answer.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.core.ids import EdgeName, StageName
from fleet.core.request import Sampling
from fleet.engine.base import Arrays
from fleet.models.checkpoint import CheckpointReader
from fleet.processing.tokenizer import load_tokenizer
from fleet.stages.qwen3_omni.thinker import build
from tests.oracle.cases import CASES
from tests.oracle.twins import (
    Built,
    Truth,
    ask,
    codes_of,
    speaking_stages,
    speaking_twin,
    tokens_of,
)
from tests.stage_options import stage_options

pytestmark = pytest.mark.one_file_in(6, "engines")

THINKER, TALKER = StageName("thinker"), StageName("talker")
TEXT, THOUGHT, AUDIO = EdgeName("text"), EdgeName("thought"), EdgeName("audio")
EMBEDDING = "thinker.model.embed_tokens.weight"


def test_each_stage_loads_its_own_weights_and_no_others(
    tiny_checkpoint: Path, built: Built
) -> None:
    names = set(read_weights(tiny_checkpoint))
    thinker, talker = (set(built[stage].weight_names) for stage in (THINKER, TALKER))
    assert thinker == {
        name
        for name in names
        if name.startswith("thinker.") and ".visual." not in name and "visual" not in name
    }
    assert talker == {name for name in names if name.startswith("talker.")} | {EMBEDDING}
    assert len(built[THINKER].weight_names) == len(thinker), "a weight was read twice"


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {
        name: weight
        for shard in folder.glob("*.safetensors")
        for name, weight in load_file(shard).items()
    }


def rewritten(checkpoint: Path, out_dir: Path) -> Path:
    """Write the checkpoint's weights as newer tools do: experts fused, the Thinker's text model
    nested deeper, two shards.
    """
    shutil.copytree(checkpoint, out_dir)
    weights = read_weights(out_dir)
    for shard in out_dir.glob("*.safetensors"):
        shard.unlink()
    fused: dict[str, Tensor] = {}
    for name in sorted(weights):
        if ".experts." not in name:
            fused[name.replace("thinker.model.", "thinker.model.language_model.")] = weights[name]
        elif ".experts.0.gate_proj" in name:
            stem = name.removesuffix("0.gate_proj.weight")
            each = range(
                sum(key.startswith(stem) and key.endswith("gate_proj.weight") for key in weights)
            )
            new = stem.replace("thinker.model.", "thinker.model.language_model.")
            fused[f"{new}gate_up_proj"] = torch.stack(
                [
                    torch.cat([weights[f"{stem}{n}.{part}_proj.weight"] for part in ("gate", "up")])
                    for n in each
                ]
            )
            fused[f"{new}down_proj"] = torch.stack(
                [weights[f"{stem}{n}.down_proj.weight"] for n in each]
            )
    weight_map = {
        name: f"model-{n % 2 + 1:05}-of-00002.safetensors" for n, name in enumerate(fused)
    }
    for shard in set(weight_map.values()):
        save_file(
            {name: fused[name].contiguous() for name in fused if weight_map[name] == shard},
            out_dir / shard,
        )
    (out_dir / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return out_dir


def test_other_weight_layouts_load_as_the_same_model(
    tiny_checkpoint: Path, tmp_path: Path, truth: Truth
) -> None:
    asked = ask(tiny_checkpoint, [case for case in CASES if case.name == "audio"])
    twin = speaking_twin(speaking_stages(rewritten(tiny_checkpoint, tmp_path / "other")))
    answers = twin.run(asked.specs, asked.blobs)
    assert tokens_of(answers, asked.specs[0].id) == truth["audio"].token_ids
    assert codes_of(answers, asked.specs[0].id).tolist() == truth["audio"].codes.tolist()


@pytest.mark.parametrize("stage", [THINKER, TALKER])
def test_folder_without_weights_is_refused_in_one_line(
    tiny_checkpoint: Path, tmp_path: Path, stage: StageName
) -> None:
    folder = tmp_path / "empty"
    shutil.copytree(tiny_checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    with pytest.raises(ConfigError, match="has no weights") as caught:
        speaking_stages(folder, stages=[stage])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [THINKER, TALKER])
def test_damaged_or_missing_weight_file_is_named(
    tiny_checkpoint: Path, tmp_path: Path, stage: StageName
) -> None:
    folder = rewritten(tiny_checkpoint, tmp_path / "damaged")
    shard = folder / "model-00002-of-00002.safetensors"
    with shard.open("r+b") as weights:
        weights.truncate(shard.stat().st_size - 100)
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors cannot be read"):
        speaking_stages(folder, stages=[stage])
    shard.unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors cannot be read"):
        speaking_stages(folder, stages=[stage])


def test_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="a llama model"):
        build(stage_options(stage=THINKER, checkpoint=tmp_path))


def test_missing_weight_is_named(tiny_checkpoint: Path) -> None:
    reader = CheckpointReader(tiny_checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"no weight thinker\.nothing"):
        reader.get("thinker.nothing")


def test_text_only_request_uses_no_other_edge(tiny_checkpoint: Path, built: Built) -> None:
    spec = ask(tiny_checkpoint, CASES[:1]).specs[0]
    spoken, silent = spec, replace(spec, outputs=(TEXT,))
    twin = speaking_twin(built)
    assert set(twin.run([silent])[silent.id]) == {TEXT}
    assert tokens_of(twin.run([silent]), silent.id) == tokens_of(twin.run([spoken]), spoken.id)


def test_audio_only_request_gives_the_same_speech(
    tiny_checkpoint: Path, built: Built, truth: Truth
) -> None:
    spec = replace(ask(tiny_checkpoint, CASES[:1]).specs[0], outputs=(AUDIO,))
    answers = speaking_twin(built).run([spec])
    assert TEXT not in answers[spec.id]
    assert codes_of(answers, spec.id).tolist() == truth[CASES[0].name].codes.tolist()


def test_last_token_is_in_the_text_but_not_spoken(tiny_checkpoint: Path, built: Built) -> None:
    spec = ask(tiny_checkpoint, CASES[:1]).specs[0]
    answers = speaking_twin(built).run([spec])
    shown = tokens_of(answers, spec.id)
    assert _thought_tokens(answers[spec.id][THOUGHT], len(spec.prompt_ids)) == shown[:-1]


def test_stop_string_ends_text_and_thought_where_it_is_complete(
    tiny_checkpoint: Path, built: Built
) -> None:
    spec = ask(tiny_checkpoint, CASES[:1]).specs[0]
    tokenizer = load_tokenizer(tiny_checkpoint)
    whole = tokens_of(speaking_twin(built).run([spec]), spec.id)
    stop = tokenizer.decode(whole[4:7])
    sampling = spec.sampling[THINKER]
    stopping = replace(
        spec,
        sampling={
            **spec.sampling,
            THINKER: Sampling(max_tokens=sampling.max_tokens, stop=("unseen", stop)),
        },
    )
    answers = speaking_twin(built).run([stopping])
    shown = tokens_of(answers, spec.id)
    assert shown == whole[: len(shown)]
    assert len(shown) <= 7
    assert stop in tokenizer.decode(shown)
    assert stop not in tokenizer.decode(shown[:-1])
    assert _thought_tokens(answers[spec.id][THOUGHT], len(spec.prompt_ids)) == shown[:-1]
    assert codes_of(answers, spec.id).shape[1] > 0
    assert built[THINKER].engine.stats().running == 0


def test_stop_string_is_not_detected_before_min_tokens(tiny_checkpoint: Path, built: Built) -> None:
    spec = ask(tiny_checkpoint, CASES[:1]).specs[0]
    tokenizer = load_tokenizer(tiny_checkpoint)
    whole = tokens_of(speaking_twin(built).run([spec]), spec.id)
    sampling = replace(
        spec.sampling[THINKER],
        stop=(tokenizer.decode(whole[1:2]), tokenizer.decode(whole[8:9])),
        min_tokens=8,
    )
    answers = speaking_twin(built).run(
        [replace(spec, sampling={**spec.sampling, THINKER: sampling})]
    )
    assert tokens_of(answers, spec.id) == whole[:9]


@pytest.mark.parametrize(
    ("wanted", "least"),
    [(Sampling(), 0), (Sampling(min_tokens=6), 6), (Sampling(ignore_eos=True), 11)],
)
def test_speech_has_the_requested_number_of_frames(
    wanted: Sampling, least: int, tiny_checkpoint: Path, tmp_path: Path, built: Built
) -> None:
    """Speech has at least the requested minimum of frames, although the checkpoint's end code is
    the code with which the first frame would begin.
    """
    spec = ask(tiny_checkpoint, CASES[:1]).specs[0]
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "ending")
    config = json.loads((folder / "config.json").read_text())
    config["talker_config"]["codec_eos_token_id"] = int(
        codes_of(speaking_twin(built).run([spec]), spec.id)[0, 0]
    )
    (folder / "config.json").write_text(json.dumps(config))
    stages = {**built, **speaking_stages(folder, stages=(TALKER,))}
    asked = replace(wanted, max_tokens=12)
    answers = speaking_twin(stages).run([replace(spec, sampling={**spec.sampling, TALKER: asked})])
    frames = codes_of(answers, spec.id).shape[-1]
    assert least <= frames <= 11 and (frames > 0) == (least > 0)


def _thought_tokens(chunks: Sequence[Arrays], prompt_len: int) -> list[int]:
    return [int(token) for arrays in chunks for token in arrays["ids"]][prompt_len:]
