"""Check of a chat whose last message the answer continues, under vLLM's names. Source: vllm 0.32,
entrypoints/openai/protocol.py (`check_generation_prompt`).
"""

from fleet.core.errors import BadInput, UnsupportedValue

CONTINUE, ADD_PROMPT = "continue_final_message", "add_generation_prompt"


def check_continuation(
    continues: bool | None, opens: bool | None, *, last_role: str, spoken: bool
) -> None:
    """Check the fields of a chat. `continues`, `opens`: values of `continue_final_message` and
    `add_generation_prompt`. `last_role`: role of the last message. `spoken`: the answer has audio.

    Raises: BadInput, UnsupportedValue.
    """
    if not continues:
        if opens is False:
            raise UnsupportedValue(
                f"{ADD_PROMPT}: an answer begins a new message, or continues the last one with "
                f"{CONTINUE}: true",
                param=ADD_PROMPT,
            )
        return
    if opens is not False:
        raise BadInput(f"{CONTINUE}: needs {ADD_PROMPT}: false too", param=CONTINUE)
    if last_role != "assistant":
        raise BadInput(
            f"{CONTINUE}: the last message is by {last_role}; let it be the assistant's, whose "
            "text is continued",
            param=CONTINUE,
        )
    if spoken:
        raise UnsupportedValue(
            f"{CONTINUE}: not served with speech; ask for text alone", param=CONTINUE
        )
