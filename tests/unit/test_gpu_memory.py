"""Registration and reads of GPU memory, on a double of NIXL's bindings that accepts them as NIXL on
a GPU does.
"""

from dataclasses import dataclass, field

import pytest

from fleet.core.pages import Memory, PagesRef, spans_between
from fleet.transfer import agent
from fleet.transfer.agent import Agent

HOST, GPU = "host memory", "GPU memory"
Descriptors = tuple[str, list[tuple[object, ...]]]


@dataclass
class NixlDouble:
    """Double of NIXL's bindings and agent. Descriptor lists are (kind of memory, descriptors)."""

    DRAM_SEG: str = HOST
    VRAM_SEG: str = GPU
    NIXL_READ: str = "read"
    NIXL_SUCCESS: str = "done"
    registered: list[Descriptors] = field(default_factory=list[Descriptors])
    reads: list[tuple[Descriptors, Descriptors]] = field(
        default_factory=list[tuple[Descriptors, Descriptors]]
    )

    def nixlAgentConfig(self) -> "NixlDouble":
        return self

    def nixlAgent(self, _name: str, _config: object) -> "NixlDouble":
        return self

    def createBackend(self, _name: str, _parameters: object) -> int:
        return 7

    def nixlRegDList(self, kind: str, regions: list[tuple[object, ...]]) -> Descriptors:
        return kind, regions

    nixlXferDList = nixlRegDList

    def registerMem(self, descriptors: Descriptors, _backends: object) -> None:
        self.registered.append(descriptors)

    def createXferReq(
        self, _operation: object, local: Descriptors, remote: Descriptors, *_others: object
    ) -> int:
        self.reads.append((local, remote))
        return 1

    def postXferReq(self, _handle: int, _note: bytes) -> None:
        pass


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> NixlDouble:
    double = NixlDouble()
    monkeypatch.setattr(agent, "load_bindings", lambda: double)
    return double


def pages(number: int, device: int | None) -> PagesRef:
    return PagesRef(
        address=4096,
        num_layers=1,
        layer_bytes=1024,
        block_bytes=64,
        pages=(number,),
        layout="same",
        device=device,
    )


def test_memory_is_registered_as_its_kind_under_its_device(nixl: NixlDouble) -> None:
    end = Agent("end", [Memory(4096, 64)])
    end.register(Memory(8192, 128, 0))
    end.register(Memory(8192, 128, 3))
    assert nixl.registered == [
        (HOST, [(4096, 64, 0, "")]),
        (GPU, [(8192, 128, 0, "")]),
        (GPU, [(8192, 128, 3, "")]),
    ]


@pytest.mark.parametrize(("remote", "local"), [(None, None), (1, 2), (None, 0), (1, None)])
def test_read_names_the_memory_of_both_sides(
    nixl: NixlDouble, remote: int | None, local: int | None
) -> None:
    """A read names the kind of memory of both sides, since the two roles of a split stage may run
    on different GPUs, or one role on a CPU.
    """
    Agent("end", []).start_read("peer", spans_between(pages(2, remote), pages(5, local)))
    kinds = {True: HOST, False: GPU}
    destination = (kinds[local is None], [(4096 + 5 * 64, 64, local or 0)])
    source = (kinds[remote is None], [(4096 + 2 * 64, 64, remote or 0)])
    assert nixl.reads == [(destination, source)]
