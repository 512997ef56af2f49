"""Words that an answer must not contain, as token ids. Knows no request.

Source: vllm 0.32, sampling_params.py (`update_from_tokenizer`).
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from fleet.core.errors import BadInput
from fleet.processing.tokenizer import token_ids


def bad_word_ids(
    tokenizer: Tokenizer, words: Sequence[str], where: str
) -> tuple[tuple[int, ...], ...]:
    """Return the token id sequences that write a word of `words`: the word without a leading space,
    and also the word with a leading space if the first token then differs and the number of tokens
    is the same. `where`: field of the user's input that has the words.

    Raises: BadInput for a word without tokens.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(token_ids(tokenizer, word.lstrip(), where))
        if not bare:
            raise BadInput(f"{where}: {word[:40]!r} has no tokens; remove it", param=where)
        spaced = tuple(token_ids(tokenizer, " " + word.lstrip(), where))
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))
