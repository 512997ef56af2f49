"""Fixture of the tests that run `fleet up`; each test module defines its own fixture `fleet`."""

from collections.abc import Iterator

import pytest
import redis

from fleet.control.connect import connect
from tests.e2e.fleets import ProcessFleet


@pytest.fixture
def control(fleet: ProcessFleet) -> Iterator[redis.Redis]:
    """A client of the fleet's Redis."""
    with connect(fleet.redis_url) as client:
        yield client
