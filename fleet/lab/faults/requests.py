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
"""Prompts that are joined to that of a conversation which is saved: a longer copy."""
SOAK_TOKENS, SOAK_FRAMES = (6, 12), (10, 40)
TEMPERATURE = 0.9


def is_sampled(request: int) -> bool:
    """Return True for every other request: those are sampled with a seed of their own, the others
    are greedy.
    """
    return request % 2 == 1


def make_bodies(model: str, config: FleetConfig, options: ChaosOptions) -> list[bytes]:
    """Encode the requests, with audio where the graph produces it."""
    return _encode(model, config, options.seed, options.requests, MAX_TOKENS, FRAMES)


def make_save_tasks(model: str, config: FleetConfig, seed: int, count: int) -> list[SaveTask]:
    """Make conversations of one turn with a long prompt, every other one sampled."""
    rng = random.Random(f"saves {seed}")
    tasks: list[SaveTask] = []
    for number in range(count):
        prompt, draws, tokens = (
            " ".join(rng.sample(PROMPTS, SAVED_PROMPTS)),
            rng.randrange(2**31),
            rng.randint(*MAX_TOKENS),
        )
        name, temperature = f"chaos-{seed}-{number}", TEMPERATURE if is_sampled(number) else 0.0
        bounds = {
            stage: {**bound, "temperature": temperature}
            for stage, bound in stage_bounds(config, tokens, rng.randint(*FRAMES)).items()
        }
        body, body_loaded = (
            encode_call(
                model,
                prompt,
                config,
                bounds,
                temperature=temperature,
                seed=draws,
                conversation=key,
                stream_options=ChatStreamOptions(include_event_ids=True),
            )
            for key in (name, f"{name}-loaded")
        )
        tasks.append(
            SaveTask(name=name, body=body, loaded=f"{name}-loaded", body_loaded=body_loaded)
        )
    return tasks


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
        sampled = is_sampled(number)
        if sampled:
            bounds = {
                stage: {"max_tokens": sampling["max_tokens"]} for stage, sampling in bounds.items()
            }
        prompt, draws = rng.choice(PROMPTS), rng.randrange(2**31)
        temperature = TEMPERATURE if sampled else 0.0
        resumable = ChatStreamOptions(include_event_ids=True)
        bodies.append(
            encode_call(
                model,
                prompt,
                config,
                bounds,
                temperature=temperature,
                seed=draws,
                stream_options=resumable,
            )
        )
    return bodies
