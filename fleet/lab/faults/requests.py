"""Requests of a chaos run: bounded in length and different from each other, generated from one
seed. Takes the stages from the graph.
"""

import random
from base64 import b64encode
from collections.abc import Sequence

from fleet.config import FleetConfig
from fleet.lab.client.chat import ChatStreamOptions, EncodedAudio
from fleet.lab.faults.options import ChaosOptions
from fleet.lab.faults.saves import SaveTask
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.measure.serving import encode_call, stage_bounds

MAX_TOKENS, FRAMES = (12, 32), (40, 120)
"""Ranges of the random length limits of an answer: long enough for a fault in the middle, short
enough for many answers.
"""
SAVED_PROMPTS = 6
"""Number of prompts joined into the prompt of a saved conversation, so that copying its KV blocks
takes longer.
"""
SOAK_TOKENS, SOAK_FRAMES = (6, 12), (10, 40)
TEMPERATURE = 0.9


def is_sampled(request: int) -> bool:
    """Return True if a request uses random sampling with its own seed. Every second request does;
    the others are greedy.
    """
    return request % 2 == 1


def is_spoken(request: int) -> bool:
    """Return True if a request is a spoken question in a run that has clips: two of every four, one
    greedy and one sampled.
    """
    return request % 4 >= 2


def make_bodies(
    model: str, config: FleetConfig, options: ChaosOptions, clips: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the encoded request bodies of a run; answers have audio if the graph produces it.
    `clips`: spoken questions as WAV files, used by half of the requests; () for typed questions
    only.
    """
    return _encode(model, config, options.seed, options.requests, MAX_TOKENS, FRAMES, clips)


def make_soak_bodies(model: str, config: FleetConfig, seed: int, count: int) -> list[bytes]:
    """Return encoded request bodies with short answers, for a soak."""
    return _encode(model, config, seed, count, SOAK_TOKENS, SOAK_FRAMES)


def _encode(
    model: str,
    config: FleetConfig,
    seed: int,
    count: int,
    tokens: tuple[int, int],
    frames: tuple[int, int],
    clips: Sequence[bytes] = (),
) -> list[bytes]:
    rng = random.Random(seed)
    spoken = [EncodedAudio(b64encode(clip).decode()) for clip in clips]
    bodies: list[bytes] = []
    for number in range(count):
        bounds = stage_bounds(config, rng.randint(*tokens), rng.randint(*frames))
        if is_sampled(number):
            bounds = {
                stage: {"max_tokens": sampling["max_tokens"]} for stage, sampling in bounds.items()
            }
        bodies.append(
            encode_call(
                model,
                rng.choice(spoken if spoken and is_spoken(number) else PROMPTS),
                config,
                bounds,
                temperature=_temperature(number),
                seed=rng.randrange(2**31),
                stream_options=ChatStreamOptions(include_event_ids=True),
            )
        )
    return bodies


def _temperature(request: int) -> float:
    return TEMPERATURE if is_sampled(request) else 0.0


def make_save_tasks(model: str, config: FleetConfig, seed: int, count: int) -> list[SaveTask]:
    """Return conversations to save: one turn with a long prompt each, every other one with random
    sampling.
    """
    rng = random.Random(f"saves {seed}")
    return [_save_task(model, config, f"chaos-{seed}-{at}", at, rng) for at in range(count)]


def _save_task(
    model: str, config: FleetConfig, name: str, number: int, rng: random.Random
) -> SaveTask:
    prompt, sampling_seed = " ".join(rng.sample(PROMPTS, SAVED_PROMPTS)), rng.randrange(2**31)
    bounds = stage_bounds(config, rng.randint(*MAX_TOKENS), rng.randint(*FRAMES))
    temperature, loaded = _temperature(number), f"{name}-loaded"
    body, body_loaded = (
        encode_call(
            model,
            prompt,
            config,
            {stage: {**bound, "temperature": temperature} for stage, bound in bounds.items()},
            temperature=temperature,
            seed=sampling_seed,
            conversation=conversation,
            stream_options=ChatStreamOptions(include_event_ids=True),
        )
        for conversation in (name, loaded)
    )
    return SaveTask(name=name, body=body, loaded=loaded, body_loaded=body_loaded)
