"""Training of Pocket's speech codec, on synthetic features."""

import numpy as np
import pytest
import torch

from fleet.lab.pocket import shape
from fleet.lab.pocket.speech.analysis import NUM_FEATURES, NUM_MELS
from fleet.lab.pocket.speech.codes import Codebook, fit
from fleet.lab.pocket.speech.pulses import synthesise
from fleet.lab.pocket.speech.wordlock import SentenceFrames
from fleet.lab.pocket.train.codec import (
    LOOKAHEAD_SAMPLES,
    Codec,
    Example,
    code2wav,
    decode,
    pitch_right,
    wave_loss,
)

NUM_FRAMES = 12


def frames(seed: int) -> SentenceFrames:
    rng = np.random.default_rng(seed)
    features = np.zeros((NUM_FRAMES, 8, NUM_FEATURES), np.float16)
    features[..., :NUM_MELS] = rng.normal(-5, 1.5, (NUM_FRAMES, 1, NUM_MELS))
    features[..., NUM_MELS:] = -12
    cycles = rng.integers(10, 13, NUM_FRAMES).astype(np.int16)
    pitch_hz = np.repeat(cycles[:, None] * 12.5, 8, axis=1).astype(np.float16)
    return SentenceFrames(
        features=features, pitch_hz=pitch_hz, cycles=cycles, pointer=np.zeros(NUM_FRAMES, np.int16)
    )


@pytest.fixture(scope="module")
def book() -> Codebook:
    return fit(
        np.concatenate([frames(seed).features for seed in range(40)]), seed=0, codebook_size=16
    )


@pytest.fixture(scope="module")
def codec(book: Codebook) -> Codec:
    examples = [
        Example(codes=book.encode(each.features, each.cycles), frames=each)
        for each in map(frames, range(3))
    ]
    return Codec(book, examples[:2], examples[2:], seed=5, may_compile=False)


def codes_of(codec: Codec, count: int) -> torch.Tensor:
    rng = np.random.default_rng(1)
    return torch.from_numpy(rng.integers(0, 16, (2, shape.NUM_CODE_GROUPS, count)))


@torch.no_grad()
def test_training_forward_equals_transformers(codec: Codec) -> None:
    codes = codes_of(codec, 9)
    expected = codec.module(codes)[:, 0]
    computed = decode(codec.module, codes)
    assert computed.clamp(-1, 1).numpy() == pytest.approx(expected.numpy(), abs=1e-4)
    assert expected.shape[1] == 9 * shape.SAMPLES_PER_FRAME - LOOKAHEAD_SAMPLES


@torch.no_grad()
def test_code_changes_no_sample_before_its_lookahead(codec: Codec) -> None:
    """A code changes no sample before its lookahead, so that sample i of the output corresponds to
    sample i of the target.
    """
    codes = codes_of(codec, 9)
    changed = codes.clone()
    changed[:, 0, 5] = (codes[:, 0, 5] + 1) % 16
    differs = (decode(codec.module, codes) - decode(codec.module, changed)).abs().amax(0) > 1e-6
    first = int(differs.nonzero()[0])
    assert 5 * shape.SAMPLES_PER_FRAME - LOOKAHEAD_SAMPLES <= first < 5 * shape.SAMPLES_PER_FRAME


@torch.no_grad()
def test_untrained_codec_output_depends_on_codes(codec: Codec) -> None:
    codes = codes_of(codec, 6)
    wave = decode(codec.module, codes)
    assert 0.01 < float(wave.std()) < 1
    for group in (0, shape.NUM_CODE_GROUPS - 1):
        changed = codes.clone()
        changed[:, group] = (codes[:, group] + 3) % 16
        assert float((decode(codec.module, changed) - wave).std()) > 1e-3


def test_codec_step_is_deterministic_and_trains_every_weight(codec: Codec) -> None:
    codec.module.zero_grad()
    first, figures = codec.loss(np.random.default_rng(3), 0)
    first.backward()
    again, _ = codec.loss(np.random.default_rng(3), 0)
    assert float(first.detach()) == float(again.detach())
    assert set(figures) == {"wave", "convergence", "log_spectra"}
    untrained = [
        name
        for name, weight in codec.module.named_parameters()
        if weight.grad is None or not weight.grad.isfinite().all() or not weight.grad.any()
    ]
    assert untrained == []


def test_codec_initial_weights_depend_on_seed_only(book: Codebook, codec: Codec) -> None:
    fresh = code2wav(book, seed=5).state_dict()
    assert all(
        torch.equal(weight, fresh[name]) for name, weight in codec.module.state_dict().items()
    )


def test_wave_loss_is_zero_for_target_and_finite_for_silence() -> None:
    target = torch.from_numpy(synthesise(frames(0).features, frames(0).cycles))[None]
    assert sum(float(term) for term in wave_loss(target, target).values()) == 0
    silence = torch.zeros_like(target, requires_grad=True)
    torch.stack(list(wave_loss(silence, target).values())).sum().backward()
    assert silence.grad is not None and silence.grad.isfinite().all() and silence.grad.any()


def test_pitch_within_a_semitone_counts_as_right() -> None:
    wave = synthesise(frames(0).features, np.full(NUM_FRAMES, 11, np.int16))
    steady = np.full(8 * NUM_FRAMES, 137.5, np.float16)
    assert pitch_right(wave, steady) == 1
    assert pitch_right(wave, (steady * 2 ** (2 / 12)).astype(np.float16)) == 0
    assert pitch_right(wave, np.zeros_like(steady)) == 1


def test_codec_evaluation_figures_are_finite(codec: Codec) -> None:
    figures = codec.evaluate()
    assert set(figures) == {"log_mel_l1", "snr_db", "pitch_right"}
    assert all(np.isfinite(value) for value in figures.values())
