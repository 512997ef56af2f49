"""What a draft head takes from the one model that it was trained for: the hash of its weights, by
which the head names the model, and the names of its embedding.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

EMBEDDINGS = (
    "thinker.model.embed_tokens.weight",
    "thinker.model.language_model.embed_tokens.weight",
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "model.decoder.embed_tokens.weight",
)
"""Names that the token embedding may have in checkpoint files, in the order of search. The first
two are the Thinker's.
"""


@cache
def hash_of_target(folder: Path) -> str:
    """Return the SHA-256, hexadecimal, over the names and contents of a checkpoint's configuration
    and weight files.

    Files are read whole, several at a time; the result is kept while the process lives.
    """
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_hash_of_file, files))
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name} ".encode() + digest)
    return whole.hexdigest()


def _hash_of_file(path: Path) -> bytes:
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").digest()
