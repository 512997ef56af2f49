"""Sampling noise as a pure function of (seed, stage, codebook, index, token): without state, so a
replay samples the same tokens.

Gumbel noise added to scaled logits makes argmax a sample. Source: the integer mixer is `lowbias32`
of https://github.com/skeeto/hash-prospector; 64-bit keys are mixed with splitmix64 (Steele et al.,
2014).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def noise_key(seed: int, salt: int, codebook: int, index: int) -> int:
    """Return the 64-bit noise key of one sample. `salt` distinguishes stages; `index` is the index
    of the token in the answer.
    """
    key = 0
    for part in (seed, salt, codebook, index):
        key = _splitmix64(key ^ (part & _MASK64))
    return key


def noise_keys(
    seeds: Sequence[int], salt: int, num_codebooks: int, indices: Sequence[int]
) -> NDArray[np.uint64]:
    """Return the noise key of each codebook of each sample: [samples, codebooks]. `seeds` and
    `indices` have one number per sample.
    """
    keys = np.zeros((len(seeds), num_codebooks), np.uint64)
    for parts in (
        np.array([seed & _MASK64 for seed in seeds], np.uint64)[:, None],
        np.array([salt & _MASK64], np.uint64),
        np.arange(num_codebooks, dtype=np.uint64),
        np.array(indices, np.uint64)[:, None],
    ):
        keys = _splitmix64_of(keys ^ parts)
    return keys


def gumbel(keys: Sequence[int], num_tokens: int, device: torch.device) -> Tensor:
    """Return Gumbel noise for each token of the vocabulary, per noise key: float32 [keys,
    tokens].
    """
    low = torch.tensor([key & _MASK32 for key in keys], dtype=torch.int64, device=device)
    high = torch.tensor([key >> 32 for key in keys], dtype=torch.int64, device=device)
    return gumbel_of_halves(low, high, num_tokens)


def gumbel_of_halves(low: Tensor, high: Tensor, num_tokens: int) -> Tensor:
    """Return Gumbel noise for noise keys given as two halves of 32 bits, int64 [...]: float32 [...,
    tokens].
    """
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=low.device)
    mixed = _mix32(_mix32(tokens ^ low[..., None]) ^ high[..., None])
    uniform = (mixed.double() + 0.5) * 2.0**-32
    return (-(-uniform.log()).log()).float()


def _mix32(x: Tensor) -> Tensor:
    """Mix 32-bit numbers by a bijection. The numbers are int64, whose products wrap; the low 32
    bits are right for either sign.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _splitmix64_of(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `_splitmix64` of each number of an array; products of unsigned integers wrap in
    arrays.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
