"""Rules for answers that would be costly, endless or impossible to keep. Sends nothing."""

from typing import Any

Fields = dict[str, Any]


def _json(schema: object, **definitions: object) -> Fields:
    defined = {"$defs": definitions} if definitions else {}
    return {"guided_json": {**schema, **defined} if isinstance(schema, dict) else schema}


def _to(name: str) -> Fields:
    return {"$ref": f"#/$defs/{name}"}


def _object(**fields: object) -> Fields:
    return {"type": "object", "properties": fields}


def _list_of(item: object, **fields: object) -> Fields:
    return {"type": "array", "items": item, **fields}


def _nested(depth: int) -> Fields:
    schema: Fields = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


_FAN = {f"d{n + 1}": {"anyOf": [_to(f"d{n}"), _to(f"d{n}")]} for n in range(30)}
_PRODUCT = {
    "allOf": [
        {"anyOf": [_object(**{f"p{n}_{m}": {"type": "string"}}) for m in range(4)]}
        for n in range(12)
    ]
}
_INTEGER = {"type": "integer"}
_TEXT = {"type": "string"}

RULES: dict[str, Fields] = {
    "a schema of itself": _json({"$ref": "#"}),
    "schemas of one another": _json(_to("a"), a=_to("b"), b=_to("a")),
    "an object within itself": _json(_object(a={"$ref": "#"})),
    "an object without end": _json({**_object(a={"$ref": "#"}), "required": ["a"]}),
    "lists of one another": _json(_to("a"), a=_list_of(_to("b")), b=_list_of(_to("a"))),
    "an unknown reference": _json(_to("none")),
    "a reference to the network": _json({"$ref": "http://127.0.0.1:1/x.json"}),
    "a reference to a file": _json({"$ref": "file:///etc/passwd"}),
    "references that multiply": _json(_to("d30"), d0=_TEXT, **_FAN),
    "alternatives that multiply": _json(_PRODUCT),
    "ten thousand values": _json({"enum": [f"v{n}" for n in range(10_000)]}),
    "five thousand values": _json({"enum": [f"v{n}" for n in range(5_000)]}),
    "no value": _json({"enum": []}),
    "a schema of a megabyte": _json({"description": "x" * 1_000_000}),
    "a text of a megabyte": _json("x" * 1_000_000),
    "thousands of properties": _json(_object(**{f"p{n}": _TEXT for n in range(10_000)})),
    "a deep schema": _json(_nested(150)),
    "a text ten thousand levels deep": _json('{"not":' * 9_000 + "{}" + "}" * 9_000),
    "a text that is deep": _json("[" * 60_000),
    "half a character": _json('{"title": "\\ud800"}'),
    "bounds that exclude all": _json({**_INTEGER, "minimum": 5, "maximum": 3}),
    "lengths that exclude all": _json({**_TEXT, "minLength": 5, "maxLength": 3}),
    "a billion characters": _json({**_TEXT, "minLength": 10**9}),
    "a billion items": _json(_list_of(_INTEGER, minItems=10**9)),
    "bounds of 1e308": _json({"type": "number", "minimum": -1e308, "maximum": 1e308}),
    "bounds of 1e30": _json({**_INTEGER, "minimum": -(10**30), "maximum": 10**30}),
    "multiples of nothing": _json({**_INTEGER, "multipleOf": 0}),
    "multiples of a large prime": _json({**_INTEGER, "multipleOf": 1_000_003}),
    "multiples of a trifle": _json({"type": "number", "multipleOf": 1e-9}),
    "names beyond ASCII": _json(
        {
            **_object(**{"é\N{GRINNING FACE}": _TEXT, "\u202e": {}, '"': {}, "\n": {}}),
            "required": ["é"],
        }
    ),
    "types that exclude each other": _json({"allOf": [_TEXT, _INTEGER]}),
    "settings of the library": _json({"type": "object", "x-guidance": 3}),
    "a costly pattern": _json({**_TEXT, "pattern": "(x{1,1000}){1,1000}"}),
    "repetitions of repetitions": {"guided_regex": "(a+)+$"},
    "a million repetitions": {"guided_regex": "(x{1,1000}){1,1000}"},
    "a billion repetitions": {"guided_regex": "((x{1,1000}){1,1000}){1,1000}"},
    "an automaton that doubles": {"guided_regex": "(a|b)*a(a|b){25}"},
    "a long window": {"guided_regex": "(.|\\n){0,60000}b.{500}"},
    "classes of characters": {"guided_regex": r"\p{L}{1,200}\p{Han}{1,200}\w{1,500}"},
    "thousands of alternatives": {"guided_regex": "|".join(f"a{n}" for n in range(9_000))},
    "deep parentheses": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    "stars": {"guided_regex": "a" + "*" * 20_000},
    "look-ahead": {"guided_regex": "(?=a)b"},
    "a reference back": {"guided_regex": r"(a)\1"},
    "no character": {"guided_regex": r"[^\s\S]"},
    "a thousand choices": {"guided_choice": [f"choice {n}" for n in range(1_000)]},
    "too many choices": {"guided_choice": [f"choice {n}" for n in range(10_000)]},
    "choices of control characters": {"guided_choice": ['"a"\n\\', "\u2028", "%ignore", "\0"]},
    "a grammar of itself": {"guided_grammar": "start: start"},
    "a grammar that begins with itself": {"guided_grammar": 'start: start "a" | "a"'},
    "an ambiguous grammar": {"guided_grammar": 'start: start start | "a" | '},
    "a grammar of a file": {"guided_grammar": "%import .etc.passwd (X)\nstart: X"},
    "a grammar of thousands": {
        "guided_grammar": "start: " + " | ".join(f'"{n}"' for n in range(5_000))
    },
    "a deep grammar": {"ebnf": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "a deep Lark grammar": {"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "a million of a letter": {"ebnf": 'root ::= "a"{1,1000000}'},
}
