"""Hostile HTTP requests made from the OpenAPI document: wrong values of every documented field and
parameter, broken bodies, wrong methods, content types and ids. Sends nothing.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from tests.web.hostile_rules import RULES
from web.openapi.document import document
from web.openapi.operations import OPERATIONS, Operation

MODEL = "omni"
MAX_DEPTH = 6
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")
LONG = "x" * 1_000_000
DEEP_LIST = cast("list[object]", json.loads("[" * 150 + "]" * 150))
VALUES: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 1.5, -0.0, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "x", "0", "\0", "\n", "\ud800", "\udfff\ud800", "é\N{GRINNING FACE}\u202e", LONG),
    *("../../etc/passwd", "{{7*7}}", "%s%n", "<|im_end|>", "data:audio/wav;base64,", "auto"),
    *([], [None], [[]], [{}], [0, "x"], ["x"] * 300, [10**30], DEEP_LIST),
    *({}, {"": ""}, {"type": "x"}, {"id": None}, {"\ud800": 1}, {"$ref": "#"}, {"a": DEEP_LIST}),
)
TEXTS = ("", "0", "-1", "1e999", "NaN", "x", "\N{GRINNING FACE}", "[]", "{", "null", "true", "\0")
IDS = (
    *("%00", "%2f", "..", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%ff%fe", "%ed%a0%80", "%0d%0a"),
    *("x" * 5_000, "%F0%9F%98%80", "-1", "*", "{id}", "a%3fb%23c", "%25", "x;y", "None", "0"),
    *("file-" + "0" * 32, "batch_" + "0" * 32, "req-1", "resp_1", "file-..%2f..%2fx", " "),
)
BASES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    },
    "/v1/responses": {
        "model": MODEL,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    },
    "/v1/decisions": {
        "model": MODEL,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "questions": [{"type": "predicate", "instructions": "It is a greeting."}],
    },
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/audio/speech": {"model": MODEL, "input": "hi"},
    "/v1/batches": {
        "input_file_id": "file-" + "0" * 32,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "/v1/realtime/client_secrets": {"session": {"type": "realtime"}},
    "/v1/fleet/jobs": {"kind": "bench", "arguments": {}},
    "/v1/fleet/roles/{role}": {"replicas": 1},
}
BROKEN = (
    *(b"", b"{", b"[]", b"null", b"0", b'"x"', b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"{}{}"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"model":NaN}', b'{"model":"\\ud800"}', b"\0" * 100),
    *(b'{"model":"omni","model":1,"model":"omni"}', b'{"":{}}', b'{"model":"\xed\xa0\x80"}'),
    *(b'{"a":1e400}', b'{"a":' + b"9" * 5_000 + b"}", b"{'a':1}", b'{"a":1,}', b"a=1&b=2"),
)
KINDS = (
    *("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x" * 2_000),
    *("multipart/form-data; boundary=", 'multipart/form-data; boundary="', "application/json; x"),
    *(
        "multipart/form-data; boundary=b; charset=utf-7",
        "multipart/form-data; boundary=" + "b" * 80,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileRequest:
    """`raw`: the body. `allowed`: statuses beyond 499 that the route documents."""

    method: str
    path: str
    raw: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    allowed: Sequence[int] = ()

    def __str__(self) -> str:
        body = self.raw if len(self.raw) < 500 else self.raw[:200] + b" ... " + self.raw[-200:]
        return f"{self.method} {self.path[:200]} {self.headers} {body!r}"


@cache
def described() -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(json.dumps(document(MODEL))))


def path_of(op: Operation) -> str:
    return re.sub(r"{\w+}", "x", op.path)


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    return described()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def field_paths(schema: dict[str, Any], depth: int = 0) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every field that a schema documents, up to `MAX_DEPTH` levels deep."""
    found = _resolved(schema)
    if depth > MAX_DEPTH:
        return
    for kind in ("anyOf", "oneOf", "allOf"):
        for one in found.get(kind, ()):
            yield from field_paths(one, depth + 1)
    for name, inner in found.get("properties", {}).items():
        yield (name,)
        yield from ((name, *rest) for rest in field_paths(inner, depth + 1))
    for name, step in (("items", 0), ("additionalProperties", "x")):
        if isinstance(found.get(name), dict):
            yield (step,)
            yield from ((step, *rest) for rest in field_paths(found[name], depth + 1))


def with_value(body: object, path: Sequence[str | int], value: object) -> object:
    """Return a copy of `body` with a value at a path, whose missing levels are made."""
    if not path:
        return value
    step, *rest = path
    if isinstance(step, int):
        items = cast("list[object]", body) if isinstance(body, list) and body else [{}]
        return [with_value(items[0], rest, value), *items[1:]]
    fields = cast("dict[str, object]", body) if isinstance(body, dict) else {}
    return {**fields, step: with_value(fields.get(step), rest, value)}


def _post(op: Operation, raw: bytes, kind: str = "application/json") -> HostileRequest:
    return HostileRequest(
        method=op.method, path=path_of(op), raw=raw, headers={"content-type": kind}
    )


def bodies(op: Operation) -> Iterator[HostileRequest]:
    """Yield the hostile JSON bodies of an operation."""
    assert op.body is not None
    base = BASES[op.path]
    schema = {"$ref": f"#/components/schemas/{op.body.__name__}"}
    for path in dict.fromkeys(field_paths(schema)):
        for value in VALUES:
            yield _post(op, json.dumps(with_value(base, path, value)).encode())
    for rule in RULES.values():
        yield _post(op, json.dumps({**base, **rule}).encode())


def forms(op: Operation) -> Iterator[HostileRequest]:
    """Yield the hostile forms of an operation."""
    assert op.form is not None
    names = ("file", "file[]", "", "x" * 300, "model[0]", *op.form.model_fields)
    for name in names:
        for text in TEXTS:
            for head in ("", '; filename="a.jsonl"', '; filename=""', "; filename*=utf-8''%00"):
                part = f'Content-Disposition: form-data; name="{name}"{head}\r\n\r\n{text}\r\n--b'
                model = 'Content-Disposition: form-data; name="model"\r\n\r\nomni\r\n--b'
                raw = f"--b\r\n{part}\r\n{model}--\r\n".encode()
                yield _post(op, raw, "multipart/form-data; boundary=b")


def requests() -> Iterator[HostileRequest]:
    """Yield every hostile request; about twenty thousand."""
    for op in OPERATIONS:
        allowed = tuple(status for status in op.statuses if status >= 500)
        for method in METHODS:
            yield HostileRequest(method=method, path=path_of(op), allowed=allowed)
        for name in re.findall(r"{\w+}", op.path):
            for each in IDS:
                path = re.sub(r"{\w+}", "x", op.path.replace(name, each))
                yield HostileRequest(method=op.method, path=path)
        for name in (*op.query, "x", "%00"):
            for text in ("", "0", "-1", "%00", "%ed%a0%80", "9" * 400, "x%0d%0ay", "%F0%9F%98%80"):
                yield HostileRequest(
                    method=op.method, path=f"{path_of(op)}?{name}={text}", allowed=allowed
                )
        for name in op.headers:
            for text in ("", "x", "-1,-1", "9" * 400, "1.1.1", "\xff", "NaN"):
                yield HostileRequest(method=op.method, path=path_of(op), headers={name: text})
        if op.method in ("POST", "PUT", "DELETE"):
            yield from (_post(op, raw) for raw in BROKEN)
            yield from (_post(op, raw, kind) for kind in KINDS for raw in BROKEN[:4])
        if op.body is not None:
            yield from bodies(op)
        if op.form is not None:
            yield from forms(op)
