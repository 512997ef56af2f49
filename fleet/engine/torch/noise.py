"""Noise for sampling as a pure function of (seed, stage, codebook, index, token): no state, so a replay draws the same.

Gumbel noise added to scaled logits makes argmax a sample. Source: the integer mixer is `lowbias32` of
https://github.com/skeeto/hash-prospector; 64-bit keys are mixed with splitmix64 (Steele et al., 2014).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def noise_key(seed: int, salt: int, codebook: int, index: int) -> int:
    """Return one 64-bit key per draw."""
    key = 0
    for part in (seed, salt, codebook, index):
        key = _splitmix64(key ^ (part & _MASK64))
    return key


def gumbel(keys: Sequence[int], num_tokens: int, device: torch.device) -> Tensor:
    """Return noise of each token for each draw.

    Shapes: float32 [draws, tokens].
    """
    low = torch.tensor([key & _MASK32 for key in keys], dtype=torch.int64, device=device)
    high = torch.tensor([key >> 32 for key in keys], dtype=torch.int64, device=device)
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=device)
    mixed = _mix32(_mix32(tokens ^ low[:, None]) ^ high[:, None])
    uniform = (mixed.double() + 0.5) * 2.0**-32
    return (-(-uniform.log()).log()).float()


def _mix32(x: Tensor) -> Tensor:
    """Bijective on 32 bits, kept in int64, whose products wrap; the low 32 bits are right for either sign."""
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
