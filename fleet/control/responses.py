"""Ended responses in Redis, each with its input, so that a later one can continue from it. A
response is stored in one step, hence as a whole or not at all.

Knows no content.
"""

import asyncio
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fleet.config.schema import WebConfig
from fleet.control import keys, scripts
from fleet.control.connect import answer_of, run_async, text, unreachable
from fleet.control.outage import Outage, is_away

MIB = 1024 * 1024


class ResponseStore:
    """Store of responses, kept for `web.response_retention_s`. `owner`: digest of the API key that
    asked for a response; the response is found only with this digest. Any method may raise
    RedisUnreachable.
    """

    def __init__(self, client: Redis, config: WebConfig) -> None:
        self._redis = client
        self._config = config

    async def save(self, response: str, owner: str, record: bytes) -> None:
        """Store the record of a response. While Redis is away, wait and try again without a time
        limit, so that a response whose answer is already complete does not fail.
        """
        ttl_ms = self._config.response_retention_s * 1000
        max_bytes = self._config.max_stored_responses_mib * MIB
        call = scripts.save_response(response, owner, record, ttl_ms, max_bytes)
        pauses = Outage("the storing of a response")
        while True:
            try:
                await run_async(self._redis, call)
                return
            except RedisError as error:
                if not is_away(error):
                    raise unreachable(error) from error
            # Without a log line: the gateway logs the outage, once.
            await asyncio.sleep(pauses.pause_s())

    async def load(self, response: str, owner: str) -> bytes | None:
        """Return the record of a response; None if `owner` has no such response."""
        found = await answer_of(self._redis.hmget(keys.response(response), "owner", "record"))
        owned_by, record = cast("list[bytes | None]", found)
        return record if owned_by is not None and text(owned_by) == owner else None

    async def delete(self, response: str, owner: str) -> bool:
        """Delete a response. Return False if `owner` has no such response."""
        call = scripts.forget_response(response, owner)
        return text(await answer_of(run_async(self._redis, call))) == "ok"
