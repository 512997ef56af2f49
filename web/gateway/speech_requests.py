"""Requests that speak one text, piece after piece. Knows no HTTP and no stage."""

import asyncio
import time
from contextlib import AsyncExitStack

from fleet.core.errors import Overloaded
from fleet.core.ids import RequestId, new_request_id
from fleet.processing import Message, TextPart
from web.gateway.gateway import Gateway
from web.gateway.prepared_chat import ActiveRequest
from web.gateway.sampling import request_seed
from web.schema.chat import ChatOptions

RETRY_S = 0.25
PATIENCE_S = 30.0
"""Seconds for which a later piece of a text is submitted again while the fleet is overloaded."""


class SpeechRequests:
    """Submission of the pieces of one text as requests with one seed, each when the audio of the
    previous piece is complete: at that time the client still has much audio to play.

    `answer`: stack that holds the answer of the current piece; closing it aborts the request.
    `speed`: pace of the voice, other than 1 only if a stage speaks texts. `where`: field of the
    user's input that has the text.
    """

    def __init__(
        self,
        gateway: Gateway,
        options: ChatOptions,
        speed: float,
        answer: AsyncExitStack,
        where: str = "input",
    ) -> None:
        self._gateway = gateway
        self._options = options.model_copy(update={"seed": request_seed(options)})
        self._speed = speed
        self._answer = answer
        self._where = where
        self._arrived_s = time.monotonic()

    async def submit(
        self,
        piece: str,
        request_id: RequestId,
        *,
        continues: bool = False,
        clause: str | None = None,
    ) -> ActiveRequest:
        """Submit the request of a piece. If the piece `continues` an earlier piece, its leading
        silence is not trimmed. `clause`: place of the piece within the text of which it is a
        clause; None for a piece that is not a clause.

        Raises: the errors of `Gateway.prepare_chat` and `Gateway.submit_prepared`.
        """
        gateway, text = self._gateway, TextPart(text=piece, where=self._where)
        prompt = TextPart(text=gateway.frontend.speech_prompt(piece), where=self._where)
        is_text, audio = gateway.speaks_texts, gateway.edges.audio
        chat = await gateway.prepare_chat(
            self._options,
            () if is_text else (Message(role="user", content=prompt),),
            request_id,
            given=() if is_text else text,
            speech_text=text if is_text else None,
            outputs=(audio,) if is_text and audio is not None else None,
            where=self._where,
            voice_where="voice",
            continues=continues,
            arrived_s=self._arrived_s,
        )
        chat = chat.at_speed(self._speed)
        active = await gateway.submit_prepared(chat if clause is None else chat.as_clause(clause))
        await self._answer.enter_async_context(active.answer)
        return active

    async def submit_next(self, piece: str, *, clause: str | None = None) -> ActiveRequest:
        """Submit the request of a later piece; retry for `PATIENCE_S` while the fleet is
        overloaded. Raises: the errors of `submit`.
        """
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self.submit(piece, new_request_id(), continues=True, clause=clause)
            except Overloaded:
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(RETRY_S)
