"""The chat request behind a voice response, and how a prompt that is too long is made shorter. Knows no socket."""

from web.gateway.sampling import new_seed
from web.schema.chat import AudioOptions, ChatBody, MessageBody


def chat_body(
    model: str, messages: list[MessageBody], *, spoken: bool, voice: str,
    max_output_tokens: int | None, session: str | None,
) -> ChatBody:  # fmt: skip
    """`session` names whose turns these are, so that each computes only what is new; None for a prompt of its own.

    The seed is drawn here: the same body asked again is answered alike.
    """
    return ChatBody(
        model=model,
        messages=messages,
        modalities=["text", "audio"] if spoken else ["text"],
        audio=AudioOptions(voice=voice or None) if spoken else None,
        stream=True,
        seed=new_seed(),
        max_tokens=max_output_tokens,
        prompt_cache_key=session,
    )


def shortened(body: ChatBody) -> ChatBody | None:
    """Without the oldest third of its turns, instructions kept; None where there is nothing left to leave out."""
    fixed = [message for message in body.messages if message.role == "system"][:1]
    turns = body.messages[len(fixed) :]
    if len(turns) < 2:
        return None
    return body.model_copy(update={"messages": [*fixed, *turns[max(1, len(turns) // 3) :]]})
