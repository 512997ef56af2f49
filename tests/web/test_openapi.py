"""The OpenAPI document has every route, and requests generated from it cause no 5xx."""

from typing import Any, cast

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from starlette.routing import Route

from tests.web.conftest import Loaded, ServedGateway
from tests.web.fake_client import Script
from web.app import create_app
from web.openapi.document import document
from web.openapi.operations import OPERATIONS, Operation

pytestmark = pytest.mark.one_file_in(3, "gateways under load")

DESCRIBED = ("/v1/", "/health", "/ready", "/metrics", "/openapi.json")
"""Prefixes of the API's routes; other routes are pages."""
MODEL = "omni"


def test_every_api_route_has_operation(loaded: Loaded) -> None:
    client = loaded.fake_client()
    app = create_app(loaded.config, client, loaded.frontend, None)
    routes = [route for route in app.routes if isinstance(route, Route)]
    served = {
        (method, route.path.replace(":path", ""))
        for route in routes
        for method in route.methods or ()
        if method != "HEAD" and route.path.startswith(DESCRIBED)
    }
    assert {(op.method, op.path) for op in OPERATIONS} == served


def test_document_is_served_and_its_references_resolve(gateway: ServedGateway) -> None:
    served = gateway.http.get("/openapi.json").json()
    assert served == msgspec.json.decode(msgspec.json.encode(document(MODEL)))
    schemas = served["components"]["schemas"]
    names = {ref.removeprefix("#/components/schemas/") for ref in references(served)}
    assert names <= set(schemas) and len(names) > 20
    chat = served["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("ChatBody")
    assert {"text/event-stream", "application/json"} == set(chat["responses"]["200"]["content"])


def references(value: object) -> list[str]:
    if isinstance(value, dict):
        inner = cast("dict[str, object]", value)
        own = [inner["$ref"]] if isinstance(inner.get("$ref"), str) else []
        return [str(ref) for ref in own] + [
            ref for each in inner.values() for ref in references(each)
        ]
    if isinstance(value, list):
        return [ref for each in cast("list[object]", value) for ref in references(each)]
    return []


CAN_BE_WRONG = [op for op in OPERATIONS if op.body or op.form or op.headers or op.query]
MADE = [*((op, "POSITIVE") for op in OPERATIONS), *((op, "NEGATIVE") for op in CAN_BE_WRONG)]


@pytest.mark.parametrize(
    ("operation", "mode"), MADE, ids=[f"{op.method} {op.path} {mode}" for op, mode in MADE]
)
def test_requests_generated_from_document_cause_no_server_error(
    gateway: ServedGateway, operation: Operation, mode: str, num_events: int
) -> None:
    """Requests generated from the document cause no server error. `mode`: valid requests, or
    invalid ones where possible. `--events` says how many there are in all.
    """
    gateway.client.script = Script(text="Yes.", num_samples=2000)
    schema = schemathesis.openapi.from_dict(document(MODEL))
    cases = schema[operation.path][operation.method].as_strategy(
        generation_mode=schemathesis.GenerationMode[mode]
    )
    seen: set[int] = set()

    @settings(
        max_examples=max(12, num_events // len(MADE)),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
        ],
    )
    @given(cases)
    def ask(case: "schemathesis.Case[Any]") -> None:
        answer = case.call(base_url=gateway.url)
        seen.add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code in operation.statuses, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    ask()
    assert seen
