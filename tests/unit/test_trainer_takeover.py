"""Trainers that take over from each other: what the folder has is continued, and neither Redis nor
a former trainer can take it back.
"""

from pathlib import Path

import pytest

from fleet.core.errors import ConfigError, EngineStopped, RedisUnreachable
from fleet.drafts.eagle3.files import WEIGHTS_FILE, load_head
from fleet.drafts.trainer.engine import CLAIM_RETRY_S, VERSION
from fleet.drafts.trainer.folder import VERSIONS, checkpoints_of
from fleet.drafts.trainer.state import MOMENTS_FILE, check_whole, read_samples
from fleet.engine.base import await_ready
from tests.draft_records import LocalRecords
from tests.trainer_bench import TARGET, TrainerBench, names, num_windows, texts, trained
from tests.unit.test_draft_trainer import greedy_sample


def test_successor_continues_from_the_folder_although_redis_lost_its_last_writes(
    tmp_path: Path,
) -> None:
    bench = TrainerBench(tmp_path)
    trained(bench, "s0")
    earlier = bench.table.copied()
    for number in (1, 2, 3):
        trained(bench, f"s{number}")
    bench.table.lose_tail(earlier)
    successor = bench.successor()
    trained(bench, "s4", successor)
    assert num_windows(successor) == 5
    assert set(read_samples(bench.checkpoint()).contained) == {f"s{number}" for number in range(5)}


def test_two_checkpoints_are_kept_and_the_older_one_serves_if_the_newest_is_damaged(
    tmp_path: Path,
) -> None:
    bench = TrainerBench(tmp_path)
    for number in range(4):
        trained(bench, f"s{number}")
    newest, older = checkpoints_of(tmp_path)
    assert (len(read_samples(newest).contained), len(read_samples(older).contained)) == (4, 3)
    (newest / MOMENTS_FILE).write_bytes(b"damaged")
    successor = bench.successor()
    trained(bench, "s9", successor)
    assert num_windows(successor) == 4, "three of the older checkpoint and one"
    manifest = check_whole(bench.checkpoint())
    assert (manifest.parent, manifest.generation) == (older.name, 5)
    trained(bench, "s8", successor)
    assert newest not in checkpoints_of(tmp_path) and len(checkpoints_of(tmp_path)) == 2


def test_checkpoint_of_another_configuration_fails_the_sample_and_stays(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    trained(bench, "s0")
    successor = bench.successor()
    vocabulary = successor.trainer.head.vocabulary_D
    vocabulary.copy_(vocabulary.flip(0))
    for _ in range(2):
        bench.send("s1", texts(2)[1], successor)
        bench.clock.now_s += 10
        (output,) = bench.run(successor)
        assert isinstance(output.error, ConfigError) and not num_windows(successor)
    assert len(checkpoints_of(tmp_path)) == 1


def test_trainer_waits_while_another_one_finishes(tmp_path: Path) -> None:
    """Samples that arrive before this trainer may write are sorted and trained on once it may."""
    bench = TrainerBench(tmp_path)
    trained(bench, "s0")
    successor = bench.successor()
    bench.table.fenced.add(bench.records.trainer)
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample, successor)
    assert not bench.run(successor) and 0 < successor.due_in_s() <= CLAIM_RETRY_S
    bench.table.fenced.clear()
    bench.clock.now_s += 10
    assert names(bench.run(successor)) == ["s0", "s1"] and num_windows(successor) == 2


def test_trainer_that_another_one_has_overtaken_ends_its_worker(tmp_path: Path) -> None:
    """A trainer whose windows are in no checkpoint, and which may write again after another one has
    written, has nothing to acknowledge: its worker ends, and its tasks continue elsewhere.
    """
    bench = TrainerBench(tmp_path, num_slots=5)
    old, records = bench.engine, bench.records
    for number, sample in enumerate(texts(2)):
        bench.send(f"s{number}", sample)
    bench.run()
    assert num_windows(old) == 1
    trained(bench, "s5", bench.successor())
    assert not records.holds()
    bench.clock.now_s += 10
    with pytest.raises(EngineStopped, match="another trainer wrote checkpoints"):
        while await_ready(old, 30):
            assert not names(old.step())
            bench.clock.now_s += 1
    with pytest.raises(EngineStopped):
        old.check()


class AbsentRecords(LocalRecords):
    """Records of a Redis that is away while `is_away`."""

    is_away = False

    def holds(self) -> bool:
        if self.is_away:
            raise RedisUnreachable("redis is away")
        return super().holds()


def test_sample_is_acknowledged_once_redis_is_back(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    records = AbsentRecords(bench.table)
    bench.engine.begin(records)
    trained(bench, "s0")
    bench.send("s1", texts(2)[1])
    records.is_away = True
    for _ in range(3):
        bench.clock.now_s += 10
        assert not bench.run() and bench.engine.due_in_s() > 0
    records.is_away = False
    bench.clock.now_s += 10
    assert names(bench.run()) == ["s1"] and num_windows(bench.engine) == 2


def test_versions_that_redis_lost_are_added_again_with_their_numbers(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    earlier = bench.table.copied()
    for number in (1, 2):
        bench.send(f"s{number}", texts(3)[number], publish="run")
        bench.clock.now_s += 10
        assert len(names(bench.run())) == 1
    before = bench.table.versions
    bench.table.lose_tail(earlier)
    successor = bench.successor()
    bench.send("s3", greedy_sample([9, 9, 2, 7]), successor, publish="run")
    bench.clock.now_s += 10
    (output,) = bench.run(successor)
    assert bench.table.versions[:2] == before and output.arrays[VERSION] == 3
    assert len({version.sha256 for version in bench.table.versions}) == 3


def test_oldest_versions_are_removed_except_those_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.drafts.trainer.versions.MOST_VERSIONS", 2)
    bench = TrainerBench(tmp_path)
    for number in range(5):
        bench.send(f"s{number}", greedy_sample([number + 1, 9, 2, 7]), publish="run")
        bench.clock.now_s += 10
        assert len(names(bench.run())) == 1
        if number == 0:
            bench.table.present = bench.table.versions[0]
    assert [version.number for version in bench.table.versions] == [1, 4, 5]
    folders = {folder.name for folder in (tmp_path / VERSIONS).iterdir()}
    assert folders == {version.sha256 for version in bench.table.versions}


def test_damaged_version_is_written_again(tmp_path: Path) -> None:
    bench = TrainerBench(tmp_path)
    bench.send("s0", texts(1)[0], publish="run")
    bench.clock.now_s += 10
    bench.run()
    (version,) = bench.table.versions
    weights = tmp_path / VERSIONS / version.sha256 / WEIGHTS_FILE
    weights.write_bytes(b"damaged")
    bench.send("s0", texts(1)[0], publish="again")
    bench.clock.now_s += 10
    (output,) = bench.run()
    assert output.arrays[VERSION] == 1 and bench.table.versions == [version]
    load_head(weights.parent, target_hash=TARGET)
