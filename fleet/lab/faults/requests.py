"""The requests of a chaos run: bounded and different, all from one seed. Knows stages only as
declared.
"""

import random

from fleet.config import FleetConfig
from fleet.lab.client.chat import ChatStreamOptions
from fleet.lab.faults.options import ChaosOptions
from fleet.lab.faults.saves import SaveTask
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.measure.serving import encode_call, stage_bounds

MAX_TOKENS, FRAMES = (12, 32), (40, 120)
"""Bounds of an answer, drawn between these: long enough for a fault in the middle, short enough for
many.
"""
SAVED_PROMPTS = 6
"""Number of prompts that are joined to the prompt of a saved conversation, for a longer copy."""
SOAK_TOKENS, SOAK_FRAMES = (6, 12), (10, 40)
TEMPERATURE = 0.9


def is_sampled(request: int) -> bool:
    """Return True for every other request, which is sampled with a seed of its own; the rest is
    greedy.
    """
    return request % 2 == 1


def make_bodies(model: str, config: FleetConfig, options: ChaosOptions) -> list[bytes]:
    """Encode the requests, with audio where the graph produces it."""
    return _encode(model, config, options.seed, options.requests, MAX_TOKENS, FRAMES)


def make_soak_bodies(model: str, config: FleetConfig, seed: int, count: int) -> list[bytes]:
    """Encode requests with short answers."""
    return _encode(model, config, seed, count, SOAK_TOKENS, SOAK_FRAMES)


def _encode(
    model: str,
    config: FleetConfig,
    seed: int,
    count: int,
    tokens: tuple[int, int],
    frames: tuple[int, int],
) -> list[bytes]:
    rng = random.Random(seed)
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
                rng.choice(PROMPTS),
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
    """Make conversations of one turn with a long prompt, every other one sampled."""
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
