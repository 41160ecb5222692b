"""Checkpoints are complete or not there."""

import json
import logging
from pathlib import Path

import pytest

from pipelinerl_common.checkpoints import MANIFEST
from pipelinerl_trainer.checkpoint import CheckpointStore


def write(store: CheckpointStore, step: int, content: str = "weights") -> None:
    folder = store.begin(step)
    (folder / "part").mkdir()
    (folder / "part" / "file").write_text(content)
    store.finish(step, {"note": step})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_the_newest_by_step_is_found_with_its_facts(store: CheckpointStore) -> None:
    assert store.newest() is None
    write(store, 9)
    write(store, 10)
    newest = store.newest()
    assert newest is not None
    assert (newest.step, dict(newest.facts), newest.folder.name) == (10, {"note": 10}, "step-10")


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write(store, step)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step-2", "step-3"]


@pytest.mark.parametrize(
    "fault", ["file gone", "file cut off", "no manifest", "half a manifest", "other schema"]
)
def test_a_torn_checkpoint_is_passed_over_with_a_warning(
    store: CheckpointStore, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, 1)
    write(store, 2)
    file, manifest = store.path(2) / "part" / "file", store.path(2) / MANIFEST
    if fault == "file gone":
        file.unlink()
    elif fault == "file cut off":
        file.write_text("weigh")
    elif fault == "no manifest":
        manifest.unlink()
    elif fault == "half a manifest":
        manifest.write_text(manifest.read_text()[:20])
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 99}))
    with caplog.at_level(logging.WARNING):
        newest = store.newest()
    assert newest is not None
    assert newest.step == 1
    assert "step-2" in caplog.text


def test_one_that_is_being_written_is_not_seen_and_what_a_dead_process_left_is_removed(
    store: CheckpointStore,
) -> None:
    (store.begin(5) / "half").write_text("x")
    assert store.newest() is None
    store.begin(6)  # before anything is written: the disk may not hold both
    assert [path.name for path in store.folder.iterdir()] == [".step-6.partial"]
    write(store, 6)
    assert [path.name for path in store.folder.iterdir()] == ["step-6"]


def test_a_torn_one_is_replaced_by_the_same_step(store: CheckpointStore) -> None:
    write(store, 3)
    (store.path(3) / MANIFEST).unlink()
    write(store, 3, "new")
    newest = store.newest()
    assert newest is not None
    assert (newest.folder / "part" / "file").read_text() == "new"


def test_an_abandoned_one_leaves_the_older_alone(store: CheckpointStore) -> None:
    write(store, 1)
    store.begin(2)
    store.abandon(2)
    assert [path.name for path in store.folder.iterdir()] == ["step-1"]
