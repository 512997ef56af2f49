"""Training of Code2Wav to synthesize the waveform of `speech.pulses`, which is a function of the
codes, so samples can be compared.

The forward pass is the model's own with channels-last convolutions, which halves the time of a
step. The embedding starts from the centroids of the codes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)

from fleet.core.errors import ConfigError
from fleet.lab.pocket import shape
from fleet.lab.pocket.speech import pulses
from fleet.lab.pocket.speech.analysis import contour_hz, mel_edges_hz, triangles
from fleet.lab.pocket.speech.codes import NUM_SOUND_GROUPS, Codebook
from fleet.lab.pocket.speech.shards import load_spoken
from fleet.lab.pocket.speech.wordlock import CYCLES_RANGE, SentenceFrames
from fleet.lab.pocket.train.loop import Loss, Schedule, compiled

LOOKAHEAD_SAMPLES: Final = 555
"""Number of samples by which the waveform is shorter than its frames: every transposed convolution
trims both sides.
"""
NUM_CROPS, CROP_FRAMES = 5, 10
UNSCORED_FRAMES = 1
TRAIN_SHARDS: Final = 6
NUM_HELD_OUT = 24
WAVE_SCALE = 0.03
FFT_MELS: Final[Mapping[int, int]] = {256: 20, 512: 40, 1024: 64, 2048: 96}
SCHEDULE: Final = Schedule(
    steps=3000,
    learning_rate=1.5e-3,
    warmup=50,
    betas=(0.8, 0.99),
    weight_decay=0.0,
    clip=5.0,
    evaluate_every=250,
)

Activation = Callable[[Tensor, Tensor, Tensor], Tensor]


def code2wav(book: Codebook, seed: int) -> Any:
    """Return an untrained Code2Wav module of `transformers` whose embedding holds the centroids of
    the codes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = hf.Qwen3OmniMoeCode2Wav(
            Qwen3OmniMoeCode2WavConfig(**shape.model_config()["code2wav_config"])
        )
        for name, part in model.named_modules():
            _initialise(name, part)
    with torch.no_grad():
        model.decoder[-1].conv.weight *= 0.1
        model.code_embedding.weight.copy_(_code_rows(book))
    return model


def _initialise(name: str, part: nn.Module) -> None:
    """Initialise a layer so that it preserves its input's scale. With the standard deviation 0.02
    of `transformers`, the output is nearly silent after thirty layers.
    """
    if isinstance(part, nn.Conv1d):
        fan_in = part.in_channels // part.groups * part.kernel_size[0]
        nn.init.normal_(part.weight, std=(0.5 if "block" in name else 1) * fan_in**-0.5)
    elif isinstance(part, nn.ConvTranspose1d):
        nn.init.normal_(
            part.weight, std=(part.in_channels * part.kernel_size[0] / part.stride[0]) ** -0.5
        )
    elif isinstance(part, nn.Linear):
        nn.init.normal_(part.weight, std=part.in_features**-0.5)
    elif isinstance(part, hf.Qwen3OmniMoeConvNeXtBlock):
        nn.init.constant_(part.gamma, 0.1)


def _code_rows(book: Codebook) -> Tensor:
    """Return the initial rows [8 * 512, 192] of `code_embedding`: centroids, a constant, and for
    the last group the number of glottal cycles.

    The forward pass takes the mean over groups, hence the factor. Without the constant the final
    norm would remove loudness.
    """
    groups, size, axes = shape.NUM_CODE_GROUPS, book.centroids.shape[1], book.centroids.shape[2]
    rows = torch.zeros(
        groups, shape.CODEBOOK_SIZE, int(shape.model_config()["code2wav_config"]["hidden_size"])
    )
    scale = book.centroids[0].pow(2).mean(0)[:32].mean().rsqrt()
    rows[:NUM_SOUND_GROUPS, :size, :axes] = book.centroids * groups * scale
    rows[0, :, axes:] = 0.5 * groups
    counts = torch.arange(CYCLES_RANGE[1] + 1)
    rows[-1, counts, axes + counts] = 1.5 * groups
    rows[-1, counts, axes + len(counts)] = 0.1 * groups * (counts - 13.0)
    return rows.flatten(0, 1)


def snake(signal: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Apply the SnakeBeta activation of `transformers` to a signal [B, L, C]."""
    wave = torch.sin(signal * alpha.exp())
    return signal + wave * wave / (beta.exp() + 1e-9)


def decode(model: Any, codes: Tensor, activation: Activation = snake) -> Tensor:
    """Return the samples [B, T * 1920 - 555] for codes [B, 8, T], like the model's own forward
    pass, but not clamped.

    Shapes: signals are [B, L, C], which convolutions process as channels-last images of one row.
    """
    hidden = model.code_embedding(codes + model.code_offset).mean(1)
    hidden = model.pre_transformer(inputs_embeds=hidden).last_hidden_state.transpose(1, 2)
    for blocks in model.upsample:
        for block in blocks:
            hidden = block(hidden)
    signal = _conv(model.decoder[0], hidden.transpose(1, 2).contiguous())
    for block in model.decoder[1:-2]:
        signal = _decoder_block(block.block, signal, activation)
    return _conv(model.decoder[-1], _snake(model.decoder[-2], signal, activation))[..., 0]


def _decoder_block(parts: Any, signal: Tensor, activation: Activation) -> Tensor:
    signal = _upsample(parts[1], _snake(parts[0], signal, activation))
    for unit in parts[2:]:
        inner = _conv(unit.conv1, _snake(unit.act1, signal, activation))
        signal = signal + _conv(unit.conv2, _snake(unit.act2, inner, activation))
    return signal


def _snake(part: Any, signal: Tensor, activation: Activation) -> Tensor:
    return activation(signal, part.alpha, part.beta)


def _conv(causal: Any, signal: Tensor) -> Tensor:
    conv = causal.conv
    if conv.kernel_size[0] == 1:
        return functional.linear(signal, conv.weight[..., 0], conv.bias)
    padded = functional.pad(signal, (0, 0, causal.padding, 0))
    image = functional.conv2d(
        _image(padded), conv.weight[:, :, None], conv.bias, dilation=(1, conv.dilation[0])
    )
    # A copy: a compiled activation is recompiled for every shape that its argument is a view of.
    return _row(image).clone()


def _upsample(causal: Any, signal: Tensor) -> Tensor:
    conv = causal.conv
    wave = _row(
        functional.conv_transpose2d(
            _image(signal), conv.weight[:, :, None], conv.bias, stride=(1, conv.stride[0])
        )
    )
    return wave[:, causal.left_pad : wave.shape[1] - causal.right_pad].contiguous()


def _image(signal: Tensor) -> Tensor:
    return signal.unsqueeze(1).permute(0, 3, 1, 2)


def _row(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).squeeze(1)


def wave_loss(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return three losses between waveforms: of samples, of spectra (dominated by loud parts), and
    of log spectra (equal weight for all parts).

    Shapes: both [B, N] samples.
    """
    convergence, log_spectra = torch.zeros(()), torch.zeros(())
    for fft_size in FFT_MELS:
        spectrum, expected = _spectrum(output, fft_size), _spectrum(target, fft_size)
        distance = (spectrum - expected).pow(2).sum((1, 2)).sqrt() / (
            expected.pow(2).sum((1, 2)).sqrt() + 0.1
        )
        convergence = convergence + distance.mean() / len(FFT_MELS)
        # An inaudible floor, so that silence does not dominate the logarithm.
        floor, filters = 1e-2 * (fft_size / 256) ** 0.5, _filters(fft_size)
        log_spectra = (
            log_spectra
            + ((filters @ spectrum + floor).log() - (filters @ expected + floor).log()).abs().mean()
        )
        log_spectra = (
            log_spectra + 0.3 * ((spectrum + floor).log() - (expected + floor).log()).abs().mean()
        )
    return {
        "wave": (output - target).abs().mean() / WAVE_SCALE,
        "convergence": convergence,
        "log_spectra": log_spectra,
    }


def _spectrum(wave: Tensor, fft_size: int) -> Tensor:
    window = torch.hann_window(fft_size)
    # Not `abs`, whose gradient at 0 becomes NaN after a division.
    power = (
        torch.view_as_real(
            torch.stft(wave, fft_size, fft_size // 4, window=window, return_complex=True)
        )
        .pow(2)
        .sum(-1)
    )
    return (power + 1e-12).sqrt()


@cache
def _filters(fft_size: int) -> Tensor:
    """Return triangular mel filters [mels, bins], each with sum 1."""
    bins = np.linspace(0, shape.SAMPLES_PER_FRAME / shape.FRAME_S / 2, fft_size // 2 + 1)
    filters = triangles(bins, mel_edges_hz((0, bins[-1]), FFT_MELS[fft_size]))
    return torch.as_tensor(
        (filters / np.maximum(filters.sum(1, keepdims=True), 1e-9)).astype(np.float32)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A training example: codes [T, 8] and the frames that were encoded to them."""

    codes: NDArray[np.int16]
    frames: SentenceFrames


def load_examples(
    folder: Path, book: Codebook, max_shards: int = TRAIN_SHARDS
) -> tuple[list[Example], list[Example]]:
    """Return the training and the held-out examples in a folder, without sentences shorter than
    `CROP_FRAMES`. `max_shards`: number of training shards to load.

    Raises: ConfigError if a split has no such sentence.
    """

    def examples_of(split: Any, shards: int) -> list[Example]:
        found = [
            each.frames
            for each in load_spoken(folder, split, shards)
            if len(each.frames.cycles) >= CROP_FRAMES
        ]
        if not found:
            raise ConfigError(
                f"{folder} has no {split} shard; run `fleet pocket train speech`", param="folder"
            )
        return [
            Example(codes=book.encode(frames.features, frames.cycles), frames=frames)
            for frames in found
        ]

    return examples_of("train", max_shards), examples_of("held_out", 1)[:NUM_HELD_OUT]


class Codec:
    """Code2Wav as a trainable part. Target waveforms are synthesized at their first use, and
    cached.
    """

    name = "codec"

    def __init__(
        self,
        book: Codebook,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        *,
        seed: int,
        may_compile: bool = True,
    ) -> None:
        self.module = code2wav(book, seed)
        self._examples, self._held_out = examples, held_out
        self._targets: dict[int, NDArray[np.float32]] = {}
        self._activation = compiled(snake, dynamic=True) if may_compile else snake

    def loss(self, rng: np.random.Generator, step: int) -> Loss:
        codes, target = self._batch(rng)
        output = decode(self.module, codes, self._activation)
        scored = slice(UNSCORED_FRAMES * shape.SAMPLES_PER_FRAME, output.shape[1])
        terms = wave_loss(output[:, scored], target[:, scored])
        return torch.stack(list(terms.values())).sum(), terms

    def _batch(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return codes [B, 8, F] and target samples [B, F * 1920] of random crops."""
        codes: list[NDArray[np.int16]] = []
        waves: list[NDArray[np.float32]] = []
        for index in rng.integers(len(self._examples), size=NUM_CROPS).tolist():
            example = self._examples[index]
            begin = int(rng.integers(len(example.codes) - CROP_FRAMES + 1))
            codes.append(example.codes[begin : begin + CROP_FRAMES].T)
            waves.append(
                self._target(index)[begin * shape.SAMPLES_PER_FRAME :][
                    : CROP_FRAMES * shape.SAMPLES_PER_FRAME
                ]
            )
        return torch.as_tensor(np.stack(codes).astype(np.int64)), torch.as_tensor(np.stack(waves))

    def _target(self, index: int) -> NDArray[np.float32]:
        if index not in self._targets:
            frames = self._examples[index].frames
            self._targets[index] = pulses.synthesise(frames.features, frames.cycles)
        return self._targets[index]

    def evaluate(self) -> Mapping[str, float]:
        """Return the mean of `judge` over whole held-out sentences, decoded with the model's own
        forward pass.
        """
        found = [judge(self.module, example) for example in self._held_out]
        return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


@torch.no_grad()
def judge(model: Any, example: Example) -> dict[str, float]:
    """Compare a decoded sentence with its target: log-mel L1 in nats, waveform SNR in dB, and
    `pitch_right`.
    """
    wave = model(torch.as_tensor(example.codes.T.astype(np.int64))[None])[0, 0]
    target = torch.as_tensor(pulses.synthesise(example.frames.features, example.frames.cycles))[
        : len(wave)
    ]
    bands = [(_filters(1024) @ _spectrum(each, 1024) + 2e-2).log() for each in (wave, target)]
    return {
        "log_mel_l1": float((bands[0] - bands[1]).abs().mean()),
        "snr_db": float(10 * torch.log10(target.pow(2).sum() / (wave - target).pow(2).sum())),
        "pitch_right": pitch_right(wave.cpu().numpy(), example.frames.pitch_hz.reshape(-1)),
    }


def pitch_right(wave: NDArray[np.float32], teacher_hz: NDArray[np.float16]) -> float:
    """Return the share of the teacher's voiced hops at which the pitch is within a semitone of the
    teacher's.
    """
    is_voiced = teacher_hz > 0
    pitch_hz = contour_hz(wave)
    pitch_hz = np.pad(pitch_hz, (0, max(0, len(teacher_hz) - len(pitch_hz))), mode="edge")[
        : len(teacher_hz)
    ]
    semitones = 12 * np.log2(pitch_hz[is_voiced] / teacher_hz[is_voiced].astype(np.float32))
    return float((np.abs(semitones) < 1).mean()) if is_voiced.any() else 1.0
