"""Field table of `POST /v1/decisions`. Data only. Source: openai 3.57 types."""

from web.schema.fields.common import HARMLESS, IMAGES
from web.schema.fields.response import INPUT
from web.schema.fields.table import Field, FieldTable, refused, served, under

JSON_PART = "a JSON object or a list of objects, which the prompt has as text"
_QUESTION: list[Field] = [
    *served("type", "predicate, choice or score"),
    *served("name", "returned with the answer"),
    *served("instructions instructions[].type instructions[].text"),
    *served("instructions[].data", JSON_PART),
    *refused("instructions[].image_url instructions[].detail", IMAGES),
    *served("choices", "2 to 255, as far as the tokenizer has a token for each"),
    *served("choices[].value choices[].description"),
    *served("levels", "2 to 255, from the lowest to the highest"),
    *served("levels[].label levels[].description"),
]

DECISION = FieldTable(
    "POST /v1/decisions",
    served("model"),
    served("input", "a text, or messages, function calls and their outputs"),
    under("input[]", [row for row in INPUT if "input_audio" not in row.path]),
    served("input[].content[].data", JSON_PART),
    served("questions", "1 to 400; one pass of the model for each"),
    under("questions[]", _QUESTION),
    served("prompt_cache_key", "names the conversation whose computed prefix is used"),
    refused("stream", "decisions come as a whole", accepted=(False,)),
    HARMLESS,
)
