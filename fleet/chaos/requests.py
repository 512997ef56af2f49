"""What listeners ask: bounded requests that differ, all from one seed. Knows stages only as declared."""

import random

import msgspec

from fleet.bench.chat import ChatBody, StreamOptions
from fleet.bench.prompts import PROMPTS
from fleet.bench.serving import chat_of, stage_bounds
from fleet.chaos.options import ChaosPlan
from fleet.config import FleetConfig

MAX_TOKENS, FRAMES = (12, 32), (40, 120)
"""Bounds of an answer, each request's drawn between them: long enough to be struck in the middle, short enough to be many."""
TEMPERATURE = 0.9


def is_drawn(request: int) -> bool:
    """Every other request is drawn, with a seed of its own; the others are greedy."""
    return request % 2 == 1


def make_bodies(model: str, config: FleetConfig, options: ChaosPlan) -> list[bytes]:
    """Spoken where the graph speaks."""
    rng = random.Random(options.seed)
    media = set(config.graph_declaration().media.values())
    bodies: list[bytes] = []
    for number in range(options.requests):
        bounds = stage_bounds(config, rng.randint(*MAX_TOKENS), rng.randint(*FRAMES))
        drawn = is_drawn(number)
        if drawn:
            bounds = {stage: {"max_tokens": given["max_tokens"]} for stage, given in bounds.items()}
        body = ChatBody(
            model=model,
            messages=chat_of(rng.choice(PROMPTS)),
            modalities=sorted(media, reverse=True),
            audio={"format": "pcm16"} if "audio" in media else None,
            stream_options=StreamOptions(include_event_ids=True),
            temperature=TEMPERATURE if drawn else 0.0,
            seed=rng.randrange(2**31),
            fleet=bounds,
        )
        bodies.append(msgspec.json.encode(body))
    return bodies
