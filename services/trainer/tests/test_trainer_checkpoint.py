"""What a checkpoint holds: everything, so that training resumes bit by bit."""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainer_fakes as fakes
from trainer_harness import ledger, newest, setup
from transformers import AutoModelForCausalLM

from pipelinerl_common.errors import FatalError, SettingsError
from pipelinerl_trainer.checkpoint import ledger_of
from pipelinerl_trainer.export import export_final, export_policy
from pipelinerl_trainer.model import load_policy


@pytest.mark.parametrize(
    ("stage", "dtype", "options"),
    [
        (1, "float32", {}),
        (2, "float32", {"baseline": "value"}),
        (3, "float32", {"baseline": "value"}),
        (1, "bfloat16", {}),
        (2, "bfloat16", {}),
        (3, "bfloat16", {}),
    ],
)
def test_a_resumed_run_goes_on_bit_by_bit(
    tmp_path: Path, stage: int, dtype: str, options: dict[str, Any]
) -> None:
    spec: dict[str, Any] = {"model": {"dtype": dtype}, "algorithm": options}
    with setup(tmp_path, stage, **spec) as run:
        run.train(range(2))
        assert run.save(2)
        straight, weights = run.train(range(2, 4)), run.served()
    with setup(tmp_path, stage, newest(tmp_path), **spec) as run:
        assert run.train(range(2, 4)) == straight
        for name, weight in run.served().items():
            assert torch.equal(weight, weights[name]), name
    assert ledger_of(newest(tmp_path)) == ledger(2)


def test_the_same_data_gives_the_same_losses_bit_by_bit(tmp_path: Path) -> None:
    losses = []
    for _ in range(2):
        with setup(tmp_path) as run:
            losses.append(run.train(range(3)))
    assert losses[0] == losses[1]


def test_random_number_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with setup(tmp_path) as run:
        draw()
        assert run.save(1)
        expected = draw()
    with setup(tmp_path, checkpoint=newest(tmp_path)):
        assert draw() == expected


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond `limit_bytes`, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "limit_bytes", [100, 8000, 30000], ids=["configuration", "model", "optimizer"]
)
def test_a_full_disk_costs_a_checkpoint_and_neither_the_run_nor_the_older_one(
    tmp_path: Path, limit_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with setup(tmp_path) as run:
        run.train(range(1))
        assert run.save(1)
        checkpointer = run.checkpointer
        run.train(range(1, 2))
        with full_disk(limit_bytes):
            assert not checkpointer.save(2, ledger(2))
        assert checkpointer.num_failures == 1
        assert "alert=write_failed" in caplog.text
        assert newest(tmp_path).step == 1
        assert [path.name for path in run.store.folder.iterdir()] == ["step-1"]
        run.train(range(2, 3))
        assert checkpointer.save(3, ledger(3))
    assert newest(tmp_path).step == 3


def test_without_the_ledger_of_this_step_there_is_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with setup(tmp_path) as run:
        checkpointer = run.checkpointer
        assert not checkpointer.save(2, None)
        assert not checkpointer.save(2, ledger(1))
    assert "one of step 1" in caplog.text


def test_a_checkpoint_of_another_layout_is_refused_with_both_values(tmp_path: Path) -> None:
    with setup(tmp_path) as run:
        run.train(range(1))
        assert run.save(1)
    with (
        pytest.raises(SettingsError, match="zero_stage 1 there, 2 now"),
        setup(tmp_path, 2, checkpoint=newest(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_is_a_folder_that_transformers_loads(tmp_path: Path, tied: bool) -> None:
    fakes.save_tiny_model(tmp_path / "model", tied=tied)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with setup(tmp_path, model={"dtype": "bfloat16"}) as run:
        run.train(range(2))
        export_final(run.engine, run.ranks, tmp_path / "model", tmp_path / "final")
        weights = run.served()
    assert ("lm_head.weight" in weights) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.dtype == torch.bfloat16
    state = loaded.state_dict()
    for name, weight in weights.items():
        assert torch.equal(state[name], weight), name
    assert (tmp_path / "final" / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob(".*.partial"))


def test_a_large_model_is_split_into_files_with_an_index(tmp_path: Path) -> None:
    with setup(tmp_path) as run:
        (tmp_path / "sharded").mkdir()
        export_policy(
            run.engine, run.ranks, tmp_path / "model", tmp_path / "sharded", shard_bytes=6000
        )
        weights = run.served()
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded").state_dict()
    for name, weight in weights.items():
        assert torch.equal(state[name], weight), name


def test_an_export_that_cannot_be_written_says_so_and_leaves_the_older_one(tmp_path: Path) -> None:
    with setup(tmp_path) as run:
        export_final(run.engine, run.ranks, tmp_path / "model", tmp_path / "final")
        before = (tmp_path / "final" / "model.safetensors").read_bytes()
        run.train(range(1))
        with full_disk(8000), pytest.raises(FatalError, match="could not be written"):
            export_final(run.engine, run.ranks, tmp_path / "model", tmp_path / "final")
    assert (tmp_path / "final" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "there is no config.json"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "nothing-known"}'),
            "cannot be loaded",
        ),
        (
            lambda folder: (
                fakes.save_tiny_model(folder)
                and (folder / "model.safetensors").write_bytes(b"torn")
            ),
            "cannot be",
        ),
    ],
    ids=["empty", "unknown", "torn"],
)
def test_a_folder_without_a_model_is_a_settings_error(
    tmp_path: Path, prepare: Any, message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(SettingsError, match=message):
        load_policy(folder, fakes.job().spec, torch.device("cpu"))


def test_a_model_that_is_too_short_is_a_settings_error(tmp_path: Path) -> None:
    fakes.save_tiny_model(tmp_path)
    settings = fakes.job(model={"maxModelLen": 129}, trainers={"microBatchTokens": 200}).spec
    with pytest.raises(
        SettingsError, match=r"maxModelLen=129 is more than the model's 128 positions"
    ):
        load_policy(tmp_path, settings, torch.device("cpu"))
