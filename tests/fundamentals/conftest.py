"""Makes the fixtures of `tests/control_plane.py` available to the tests in this folder."""

from tests.control_plane import client as client
from tests.control_plane import control as control
from tests.control_plane import gateway_client as gateway_client
from tests.control_plane import pulled as pulled
from tests.control_plane import pytest_generate_tests as pytest_generate_tests
from tests.control_plane import server as server
