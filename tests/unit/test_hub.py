"""Checkpoints from a model hub: what is downloaded, how an interrupted download continues, what is
refused, and what the processes of a fleet find afterwards.
"""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.cli.checkpoint import hub_names, hub_of, resolve_checkpoint, resolve_configuration
from fleet.config import FleetConfig, load_config
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.hub import cache, download, progress
from fleet.hub.cache import Hub, resolve, select
from fleet.hub.download import check_space, fetch, missing_bytes
from fleet.hub.listing import read_listing
from fleet.hub.names import HubName, hub_name_of
from fleet.process.free_ports import free_port
from tests.hub_server import FakeHub, hash_of, serving_hub, small_model
from tests.support import wait_until

NAME = HubName(repo="some/model")
NEEDED = {
    "config.json",
    "tokenizer.json",
    "merges.txt",
    "chat_template.jinja",
    "empty.txt",
    "model.safetensors",
}
WEIGHTS = "model.safetensors"


class ByteCount:
    """Progress as numbers. `interrupt_at`: received bytes at which the user presses Ctrl-C."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.received = 0
        self.present = 0
        self._interrupt_at = interrupt_at
        self.waited: list[int] = []

    def update(self, n: float | None = 1, /) -> None:
        self.received += int(n or 0)
        if self._interrupt_at is not None and self.received >= self._interrupt_at:
            raise KeyboardInterrupt

    def add_present(self, size: int, /) -> None:
        self.present += size

    def wait(self, size: int, /) -> None:
        self.waited.append(size)

    def end_wait(self) -> None:
        self.waited.append(0)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serving_hub() as server:
        yield server


@pytest.fixture
def server_with_model(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr(download, "PAUSE_S", 0.001)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    fresh = FakeHub(url=server.url)
    for name in FakeHub.__slots__:
        setattr(server, name, getattr(fresh, name))
    server.publish("some/model", small_model())
    return server


@pytest.fixture
def hub(server_with_model: FakeHub, tmp_path: Path) -> Hub:
    return Hub(folder=tmp_path / "hub", endpoint=server_with_model.url)


def fetch_all(hub: Hub, name: HubName = NAME, bar: ByteCount | None = None) -> Path:
    fetch(hub, read_listing(hub, name), bar or ByteCount())
    return resolve(hub, name)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_download_has_needed_files_only_and_is_found_without_the_network(
    hub: Hub, server_with_model: FakeHub
) -> None:
    model, bar = small_model(), ByteCount()
    listing = read_listing(hub, NAME)
    assert listing.licence == "mit" and missing_bytes(hub, listing) == listing.size
    folder = fetch(hub, listing, bar)
    assert files_of(folder) == {path: model[path] for path in NEEDED}
    assert {one.path for one in server_with_model.sent} == NEEDED - {"empty.txt"}
    assert bar.received == listing.size and missing_bytes(hub, listing) == 0
    assert resolve(replace(hub, endpoint="http://127.0.0.1:1"), NAME) == folder

    again = ByteCount()
    assert fetch_all(hub, bar=again) == folder
    assert (again.received, again.present) == (0, listing.size)
    assert len(server_with_model.sent) == len(NEEDED) - 1


def test_licence_is_read_from_the_model_card(hub: Hub, server_with_model: FakeHub) -> None:
    card = {"license": "other", "license_name": "own-terms", "license_link": "https://x/LICENSE"}
    server_with_model.cards["some/model"] = card
    assert read_listing(hub, NAME).licence == "own-terms (https://x/LICENSE)"


@pytest.mark.parametrize(
    ("paths", "parts", "needed"),
    [
        (
            [cache.INDEX, "model-1-of-2.safetensors", "model-2-of-2.safetensors", WEIGHTS],
            (),
            [cache.INDEX, "model-1-of-2.safetensors", "model-2-of-2.safetensors"],
        ),
        ([WEIGHTS, "consolidated.safetensors"], (), [WEIGHTS]),
        ([cache.INDEX, "part.safetensors"], (), [cache.INDEX, "part.safetensors"]),
        (["voice.safetensors", "tokenizer.model"], (), ["tokenizer.model", "voice.safetensors"]),
        (
            ["asr/model.safetensors", "asr/config.json", "x/config.json"],
            ("asr",),
            ["asr/config.json", "asr/model.safetensors"],
        ),
        (["a.pt", "a.bin", "a.pkl", "a.ckpt", "a.npz", "a.py", "a.exe"], (), []),
        (
            ["tts/voices/a.bin", "tts/m.onnx", "x/m.onnx", "tts/b.bin", "tts/voices/x/a.bin"],
            ("tts",),
            ["tts/m.onnx", "tts/voices/a.bin"],
        ),
        (["voices/a.bin", "m.onnx", "onnx/m.onnx"], (), ["m.onnx", "voices/a.bin"]),
    ],
)
def test_weights_are_needed_once_and_other_formats_never(
    paths: list[str], parts: tuple[str, ...], needed: list[str]
) -> None:
    hub = Hub(parts=parts, extras=("*.onnx", "voices/*.bin"))
    assert select(hub, paths) == sorted(needed)


@pytest.mark.parametrize("ranges", [True, False])
def test_cut_connections_continue_where_they_broke(
    ranges: bool, hub: Hub, server_with_model: FakeHub
) -> None:
    server_with_model.ranges = ranges
    server_with_model.cuts[WEIGHTS] = [100_000, 50_000, 20_000]
    bar = ByteCount()
    folder = fetch_all(hub, bar=bar)
    assert (folder / WEIGHTS).read_bytes() == small_model()[WEIGHTS]
    starts = server_with_model.starts_of(WEIGHTS)
    assert starts == ([0, 100_000, 150_000, 170_000] if ranges else [0] * 4)
    assert bar.received + bar.present == read_listing(hub, NAME).size


def test_interrupted_download_continues_in_the_next_command(
    hub: Hub, server_with_model: FakeHub
) -> None:
    listing = read_listing(hub, NAME)
    with pytest.raises(KeyboardInterrupt):
        fetch(hub, listing, ByteCount(interrupt_at=150_000))
    with pytest.raises(ConfigError, match="some/model is not in .*; run `fleet models fetch --con"):
        resolve(hub, NAME)
    assert listing.size - 200_000 < missing_bytes(hub, listing) < listing.size - 50_000
    assert (fetch_all(hub) / WEIGHTS).read_bytes() == small_model()[WEIGHTS]
    first, second = server_with_model.starts_of(WEIGHTS)
    assert first == 0 and second > 50_000


def test_connection_that_brings_nothing_ends_with_one_line(
    hub: Hub, server_with_model: FakeHub
) -> None:
    server_with_model.cuts[WEIGHTS] = [10, *[0] * 10]
    with pytest.raises(ConfigError, match=r"^checkpoint: some/model: no connection to .*run the"):
        fetch_all(hub)
    assert len(server_with_model.starts_of(WEIGHTS)) == 1 + download.RETRIES


@pytest.mark.parametrize("path", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("flaw", ["changed", "longer", "shorter"])
def test_file_with_another_hash_does_not_get_its_name(
    path: str, flaw: str, hub: Hub, server_with_model: FakeHub
) -> None:
    content = small_model()[path]
    changed = content[:-1] + bytes([content[-1] ^ 1])
    sent = {"changed": changed, "longer": content + b"x" * 9, "shorter": content[:-1]}[flaw]
    server_with_model.sent_instead[path] = sent
    with pytest.raises(ConfigError, match=rf"some/model/.*/{path} arrived damaged .* run the comm"):
        fetch_all(hub)
    assert not list(hub.cache.rglob(f"{hash_of(content)}*[!k]"))
    assert not list(hub.cache.rglob(path)) and not list(hub.cache.rglob("main"))
    server_with_model.sent_instead.clear()
    assert (fetch_all(hub) / path).read_bytes() == content


def test_foreign_part_of_a_file_is_dropped_when_its_hash_is_wrong(hub: Hub) -> None:
    part = hub.home(NAME) / "blobs" / f"{hash_of(small_model()[WEIGHTS])}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 70_000)
    with pytest.raises(ConfigError, match="model.safetensors arrived damaged"):
        fetch_all(hub)
    part.write_bytes(b"x" * 7_000_000)
    assert (fetch_all(hub) / WEIGHTS).read_bytes() == small_model()[WEIGHTS]


def test_damaged_files_are_refused_or_repaired(hub: Hub, server_with_model: FakeHub) -> None:
    folder = fetch_all(hub)
    blob = (folder / WEIGHTS).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="incomplete in .*: model.safetensors missing; run"):
        resolve(hub, NAME)
    blob.write_bytes(b"y" * len(small_model()[WEIGHTS]))
    with pytest.raises(KeyboardInterrupt):
        fetch_all(hub, bar=ByteCount(interrupt_at=100_000))
    with pytest.raises(ConfigError, match="incomplete in .*: model.safetensors missing; run"):
        resolve(hub, NAME)
    assert (fetch_all(hub) / WEIGHTS).read_bytes() == small_model()[WEIGHTS]
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes(b"{" + small_model()["config.json"][1:-1] + b" ")
    assert files_of(fetch_all(hub)) == {path: small_model()[path] for path in NEEDED}
    assert len(server_with_model.starts_of(WEIGHTS)) == 3


def test_revisions_never_mix(hub: Hub, server_with_model: FakeHub) -> None:
    old = replace(NAME, revision=read_listing(hub, NAME).commit)
    old_folder = fetch_all(hub)
    newer = small_model(range(2, 7)) | {"config.json": b'{"model_type": "newer"}'}
    del newer["merges.txt"]
    server_with_model.publish("some/model", newer)
    server_with_model.publish("some/model", small_model([9]), branch="refs/pr/1")
    assert resolve(hub, NAME) == old_folder, "a branch stays at the commit of its last download"

    with pytest.raises(KeyboardInterrupt):
        fetch(hub, read_listing(hub, NAME), ByteCount(interrupt_at=200_000))
    assert resolve(hub, NAME) == old_folder, "and while the next one is incomplete"

    new_folder = fetch_all(hub)
    assert files_of(new_folder) == {path: newer[path] for path in NEEDED - {"merges.txt"}}
    assert resolve(hub, old) == old_folder != new_folder
    assert files_of(old_folder) == {path: small_model()[path] for path in NEEDED}
    proposed = fetch_all(hub, replace(NAME, revision="refs/pr/1"))
    assert (proposed / WEIGHTS).read_bytes() == small_model([9])[WEIGHTS]
    assert resolve(hub, NAME) == new_folder


@pytest.mark.parametrize(
    ("name", "refusal", "error"),
    [
        ("no/model", None, "no/model: .* shows no such model; correct the name or, if private, lo"),
        ("some/model@v9", None, "some/model@v9: the model has no revision v9"),
        (
            "some/model",
            (401, "GatedRepo"),
            r"gated; accept the terms at .*/some/model, then log in",
        ),
        ("some/model", (403, "GatedRepo"), r"gated; accept the terms .*`hf auth login`, or set HF"),
        ("some/model", (403, ""), r"refuses access \(403\); correct .* `hf auth login`"),
        ("some/model", (401, "*"), r"refuses access \(401\); correct the name, or log in"),
        ("some/model", (500, "*"), "answered 500; try again later"),
        ("some/model", (200, "*"), "does not answer as a model hub .*; check HF_ENDPOINT"),
        ("some/x--y", None, "not a name of the hub"),
    ],
)
def test_refusal_of_the_hub_is_one_line_with_its_remedy(
    name: str, refusal: tuple[int, str] | None, error: str, hub: Hub, server_with_model: FakeHub
) -> None:
    if refusal:
        server_with_model.refusals["some/model"] = refusal
    given = hub_name_of(name)
    assert given is not None
    with pytest.raises(ConfigError, match=error) as raised:
        fetch_all(hub, given)
    assert raised.value.param == "checkpoint" and "\n" not in raised.value.message


def test_login_opens_a_gated_model_and_its_token_stays_with_the_hub(
    hub: Hub, server_with_model: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_with_model.refusals["some/model"] = (401, "GatedRepo")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch_all(hub) / WEIGHTS).exists()
    assert {one.authorized for one in server_with_model.sent} == {False}, (
        "files are sent by another host, which must not see the token"
    )


def test_no_network_and_offline_mode_are_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = replace(hub, endpoint=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="some/model: no connection to http://127.*the folder"):
        fetch_all(nobody)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; unset it"):
        fetch_all(hub)


def test_full_disk_is_named_and_the_download_continues_afterwards(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = hub.home(NAME) / "blobs" / f"{hash_of(small_model()[WEIGHTS])}.incomplete"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"the disk of .*/hub is full; free space and run"):
        fetch_all(hub)
    part.unlink()
    assert (fetch_all(hub) / WEIGHTS).exists()

    free = type("Usage", (), {"free": 5_000_000})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: free)
    check_space(hub, 4_000_000)
    with pytest.raises(ConfigError, match="6 MB are missing, and the disk .* has 5 MB free; free"):
        check_space(replace(hub, folder=hub.cache / "not" / "there"), 6_000_000)


@pytest.mark.parametrize(
    "path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a\\..\\evil.json", "./e.json"]
)
def test_file_name_that_leads_out_of_the_folder_is_refused(
    path: str, hub: Hub, server_with_model: FakeHub, tmp_path: Path
) -> None:
    server_with_model.publish("some/model", small_model() | {path: b"{}"})
    with pytest.raises(ConfigError, match="has a file .* whose name leads out of its folder; not"):
        fetch_all(hub)
    assert server_with_model.sent == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("found", ["../../evil", "", "g" * 64, "a" * 41])
def test_hash_that_is_none_is_refused(
    found: str, hub: Hub, server_with_model: FakeHub, tmp_path: Path
) -> None:
    server_with_model.hashes[WEIGHTS] = found
    with pytest.raises(ConfigError, match="gives no size and hash of model.safetensors"):
        fetch_all(hub)
    assert list(tmp_path.iterdir()) == []


def test_model_without_safetensors_is_refused_before_the_download(
    hub: Hub, server_with_model: FakeHub
) -> None:
    files = small_model()
    kept = {path: files[path] for path in files if "safetensors" not in path}
    server_with_model.publish("some/model", kept)
    with pytest.raises(ConfigError, match="some/model has no weights .*pickled weights"):
        fetch_all(hub)
    assert server_with_model.sent == []


def test_second_download_shows_what_the_first_receives_and_transfers_it_no_more(
    hub: Hub, server_with_model: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "WAIT_S", 0.01)
    server_with_model.hold_after[WEIGHTS] = 100_000
    folders: list[Path] = []
    bars = ByteCount(), ByteCount()
    threads = [
        threading.Thread(
            target=lambda bar=bar: folders.append(fetch_all(hub, bar=bar)), daemon=True
        )
        for bar in bars
    ]
    threads[0].start()
    wait_until(lambda: server_with_model.starts_of(WEIGHTS), "the first download's weights")
    threads[1].start()
    wait_until(lambda: sum(bars[1].waited) >= 100_000, "the first download's bytes in the second")
    server_with_model.release.set()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 2 and folders[0] == folders[1]
    assert server_with_model.starts_of(WEIGHTS) == [0]
    size = read_listing(hub, NAME).size
    # Either may be the first at the small files that follow the weights.
    assert sum(bar.received for bar in bars) == size
    assert [bar.received + bar.present for bar in bars] == [size, size]
    assert [sum(bar.waited) for bar in bars] == [0, 0]


def test_wait_for_another_download_is_a_line_with_its_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.DownloadProgress("some/model", 1_000_000) as bar:
        bar.wait(400_000)
        bar.wait(200_000)
        bar.wait(-600_000)
        bar.end_wait()
        bar.add_present(1_000_000)
    lines = capsys.readouterr().out.splitlines()
    waiting = [line for line in lines if "another process downloads it" in line]
    assert " 40% 400k of 1.00M" in waiting[0] and " 60% 600k of 1.00M" in waiting[1]
    assert lines[-1].startswith("fleet: some/model: 100% 1.00M of 1.00M")


def test_progress_without_a_terminal_is_lines_of_received_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.DownloadProgress("some/model", 1_000_000) as bar:
        bar.add_present(400_000)
        bar.update(300_000)
        bar.update(300_000)
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first == "fleet: some/model:   0% 0.00 of 1.00M, ?B/s, ? left"
    assert re.fullmatch(r"fleet: some/model:  70% 700k of 1\.00M, .+B/s, 00:00 left", second)
    assert re.fullmatch(r"fleet: some/model: 100% 1\.00M of 1\.00M, .+B/s, 00:00 left", last)


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("owner/name", HubName(repo="owner/name")),
        ("owner/na.me-1@v1.0", HubName(repo="owner/na.me-1", revision="v1.0")),
        ("owner/name@refs/pr/3", HubName(repo="owner/name", revision="refs/pr/3")),
        ("owner/name@../../x", None),
        ("owner/name@a/../../../x", None),
        ("owner/name@", None),
        ("./owner/name", None),
        ("/owner/name", None),
        ("owner/name/more", None),
        ("tests/unit", None),
        ("auto", None),
    ],
)
def test_checkpoint_is_a_hub_name_unless_it_is_a_folder(
    checkpoint: str, name: HubName | None
) -> None:
    assert hub_name_of(checkpoint) == name
    assert name is None or str(name) == checkpoint


def test_processes_find_downloaded_files_and_download_none(
    hub: Hub, server_with_model: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, ("graph=text", "checkpoint=some/model", f"hub_cache={hub.folder}"))
    template = f"{server_with_model.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server_with_model.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(ConfigError, match=r"some/model is not in .*/hub; run `fleet models fetch"):
        resolve_checkpoint(config)
    assert server_with_model.sent == []
    folder = configuration_of(config)
    assert set(files_of(folder)) == {"config.json", "tokenizer.json"}
    with pytest.raises(ConfigError, match=re.escape("incomplete in")):
        resolve_checkpoint(config)
    assert fetch_all(hub) == folder == resolve_checkpoint(config)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert configuration_of(config) == folder, "without the network"


def configuration_of(config: FleetConfig) -> Path:
    return Path(resolve_configuration(config, StageName("lm")).checkpoint)


def test_checkpoints_of_stages_are_named_by_their_fields(tmp_path: Path) -> None:
    given = (
        "stages.asr.checkpoint=some/ears@v1",
        "stages.tts.checkpoint=hibari",
        f"hub_cache={tmp_path}",
    )
    own = "stages.lm.checkpoint=some/words"
    config = load_config(None, ("graph=cascade", *given, own, "checkpoint=some/unused"))
    ears, words = HubName(repo="some/ears", revision="v1"), HubName(repo="some/words")
    assert hub_names(config) == {"stages.asr.checkpoint": ears, "stages.lm.checkpoint": words}
    with pytest.raises(
        ConfigError, match=r"^stages\.lm\.checkpoint: some/words is not in"
    ) as raised:
        resolve_checkpoint(config, StageName("lm"))
    assert raised.value.param == "stages.lm.checkpoint"
    shared = load_config(None, ("graph=cascade", *given, "checkpoint=some/all"))
    assert hub_names(shared) == {
        "stages.asr.checkpoint": ears,
        "checkpoint": HubName(repo="some/all"),
    }
    assert hub_of(shared).parts == ("asr", "lm", "tts")
