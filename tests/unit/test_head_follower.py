"""A worker follows the fleet's version of the draft head by the hash of its weights, whatever
number the version has.
"""

from typing import Any, cast

from fleet.core.ids import StageName, WorkerId
from fleet.drafts.exchange.follower import HeadFollower, HeadMemory, HeadSettings
from fleet.drafts.figures.training import DraftVersion
from tests.support import wait_until


class StoredHere:
    """A fleet in which every version of the draft head is stored on this host and has the number 3:
    Redis lost that the number was given.
    """

    def __init__(self, chosen: str) -> None:
        self.chosen = chosen
        self.used: list[str] = []

    worker = WorkerId("w")

    def chosen_version(self, _: StageName) -> str:
        return self.chosen

    def read_version(self, sha256: str) -> DraftVersion:
        return DraftVersion(number=3, sha256=sha256, target="t", num_bytes=1)

    def read_local(self, sha256: str) -> bytes:
        return sha256.encode()

    def prepare(self, data: bytes, sha256: str) -> object:
        assert data == sha256.encode()
        return data

    def use(self, _: object, version: DraftVersion | None) -> None:
        self.used.append(version.sha256 if version is not None else "")

    def register(self, _: object) -> bool:
        return True


def test_head_whose_number_was_given_twice_is_exchanged_by_its_hash() -> None:
    fleet, now_s = StoredHere("aa"), [0.0]
    port = cast(Any, fleet)
    settings = HeadSettings(stage=StageName("lm"), holder_roles=(), deadline_s=1.0, floor=0.0)
    follower = HeadFollower(
        settings, port, HeadMemory(64, port), port, port, lambda _: b"", lambda: now_s[0]
    )

    def held() -> str:
        now_s[0] += 2
        follower.advance(None)
        return follower.held.sha256 if follower.held is not None else ""

    for chosen in ("aa", "bb", "aa"):
        fleet.chosen = chosen
        wait_until(lambda chosen=chosen: held() == chosen, f"{chosen} to be held")
    fleet.chosen = ""
    wait_until(lambda: held() and fleet.used[-1] == "", "the head of the start to be used")
    assert fleet.used == ["aa", "bb", "aa", ""]
    follower.close()
