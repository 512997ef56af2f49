"""Fixtures of the tests in this folder, most of them from `tests/control_plane.py`."""

import gc
from collections.abc import Iterator

import pytest

from tests.control_plane import client as client
from tests.control_plane import control as control
from tests.control_plane import gateway_client as gateway_client
from tests.control_plane import pulled as pulled
from tests.control_plane import pytest_generate_tests as pytest_generate_tests
from tests.control_plane import server as server


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable garbage collection, which would search all states of an exploration for cycles."""
    gc.disable()
    yield
    gc.enable()
