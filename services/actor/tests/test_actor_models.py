"""Models: tiny ones, their cache, the source of a job's model, and errors for broken folders."""

import concurrent.futures
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from pipelinerl_actor.models import tiny
from pipelinerl_actor.models import tiny as arithmetic
from pipelinerl_actor.models.chat import chat_token_ids
from pipelinerl_actor.models.folder import check_model_folder
from pipelinerl_actor.models.source import ModelSource, install_model
from pipelinerl_actor.models.tiny import (
    Recipe,
    cached_model,
    fingerprint,
    success_share,
    train,
)
from pipelinerl_actor.prepare import main as prepare
from pipelinerl_common.errors import SettingsError, Unavailable
from pipelinerl_common.settings import ModelSettings


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`prepare` configures the process's logging, here with a stream that ends with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


QUICK = Recipe(hidden_size=32, num_layers=1, learn_steps=2, doubt_steps=2)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=1)


@pytest.fixture
def copy(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


# Tiny models


def test_a_tiny_model_loads_and_its_tokenizer_keeps_every_character(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    text = tiny.CHARACTERS
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert model.config.vocab_size == len(tokenizer) == tiny.VOCAB_SIZE
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tiny.END_ID
    assert model.config.head_dim == 32


def test_a_chat_turn_is_one_special_token_per_role() -> None:
    tokenizer = tiny.make_tokenizer()
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "3+4="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>a<|end|><|user|>3+4=<|end|><|assistant|>"
    assert len(tokenizer(text)["input_ids"]) == 10


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    shape = tiny.TinyShape(hidden_size=32, num_layers=1)
    state = torch.random.get_rng_state()
    weights = [tiny.make_model(shape, seed).lm_head.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), state)


# The arithmetic model


def test_the_arithmetic_model_is_right_about_every_fifth_time() -> None:
    assert 0.15 <= success_share(train(Recipe())) <= 0.27


def test_training_is_repeatable() -> None:
    first, second = train(QUICK).state_dict(), train(QUICK).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_part_of_the_recipe_is_in_the_fingerprint() -> None:
    assert fingerprint(QUICK) == fingerprint(
        Recipe(hidden_size=32, num_layers=1, learn_steps=2, doubt_steps=2)
    )
    assert (
        len({fingerprint(recipe) for recipe in (Recipe(), Recipe(seed=1), Recipe(right_share=0.3))})
        == 3
    )


def test_a_cached_model_is_made_once_and_readable_by_all(tmp_path: Path) -> None:
    folder = cached_model(QUICK, tmp_path)
    written = (folder / "model.safetensors").stat()
    assert cached_model(QUICK, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns
    assert written.st_mode & 0o777 == 0o644
    check_model_folder(folder, 64)


def test_two_that_make_the_same_model_at_once_leave_one_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_have_begun = threading.Barrier(2, timeout=60)

    def train_together(recipe: Recipe) -> Qwen3ForCausalLM:
        both_have_begun.wait()
        return train(recipe)

    monkeypatch.setattr(arithmetic, "train", train_together)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        folders = {
            future.result()
            for future in [pool.submit(cached_model, QUICK, tmp_path) for _ in range(2)]
        }
    assert folders == {tmp_path / "models" / fingerprint(QUICK)}
    assert [path.name for path in (tmp_path / "models").iterdir()] == [fingerprint(QUICK)]
    check_model_folder(folders.pop(), 64)


# Folders


def _delete(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def _index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_delete("config.json"), r"config\.json is missing"),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            r"config\.json cannot be read as JSON",
        ),
        (lambda folder: (folder / "config.json").write_text("{}"), r"names no 'architectures'"),
        (
            _delete("model.safetensors"),
            r"neither model\.safetensors nor model\.safetensors\.index\.json",
        ),
        (_pickle, r"pytorch_model\.bin is a pickle"),
        (_cut, r"is cut off"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"not weights at all"),
            r"not a safetensors file",
        ),
        (_index, r"model-1\.safetensors is missing although the index lists it"),
        (_delete("tokenizer.json"), r"has no tokenizer"),
        (_delete("tokenizer_config.json"), r"tokenizer_config\.json is missing"),
    ],
)
def test_a_broken_folder_is_told_by_what_is_missing(
    copy: Path, damage: Any, complaint: str
) -> None:
    check_model_folder(copy, 64)
    damage(copy)
    with pytest.raises(SettingsError, match=complaint):
        check_model_folder(copy, 64)


def test_a_context_longer_than_the_models_is_refused(model_folder: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"maxModelLen=2000 is more than .*max_position_embeddings=1024"
    ):
        check_model_folder(model_folder, 2000)


# Sources


@pytest.mark.parametrize(
    ("uri", "revision", "complaint"),
    [
        ("no/such/folder", None, r"no folder .*no/such/folder"),
        (__file__, None, r"is a file"),
        ("s3://bucket", None, r"unknown kind"),
        ("tiny://chess", None, r"the only tiny model is tiny://arithmetic"),
        ("tiny://arithmetic?digits=2", None, r"adds one-digit numbers only"),
        ("tiny://arithmetic?size=2", None, r"unknown parameter 'size'; it has digits, seed"),
        ("tiny://arithmetic?seed=x", None, r"seed=x must be a whole number"),
        ("hf://name-only", None, r"expected hf://organisation/name"),
        (".", "main", r"only for hf:// models"),
    ],
)
def test_a_wrong_uri_is_named_with_its_remedy(
    tmp_path: Path, uri: str, revision: str | None, complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        ModelSource(tmp_path).resolve(ModelSettings(uri=uri, revision=revision, max_model_len=64))


def test_a_hub_model_that_was_not_downloaded_cannot_be_had_offline(tmp_path: Path) -> None:
    model = ModelSettings(uri="hf://no-such-organisation/no-such-model", revision="v1")
    with pytest.raises(Unavailable, match="not on this machine and --offline forbids a download"):
        ModelSource(tmp_path, offline=True).resolve(model)


def test_a_hub_that_cannot_be_reached_is_temporary(tmp_path: Path) -> None:
    model = ModelSettings(uri="hf://no-such-organisation/no-such-model")
    with pytest.raises(Unavailable, match="cannot be downloaded"):
        ModelSource(tmp_path, hub="http://127.0.0.1:9").resolve(model)


# Installation


def test_a_link_is_idempotent_and_follows_a_changed_source(
    model_folder: Path, copy: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    for source in (model_folder, model_folder, copy):
        target = install_model(source, output, copy=False)
        assert target == output / "model"
        assert target.resolve() == source.resolve()
    assert [path.name for path in output.iterdir()] == ["model"]


def test_a_copy_is_made_once_and_again_when_the_source_changes(copy: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    target = install_model(copy, output, copy=True)
    inode = target.stat().st_ino
    assert install_model(copy, output, copy=True).stat().st_ino == inode
    (copy / "generation_config.json").write_text("{}")
    assert install_model(copy, output, copy=True).stat().st_ino != inode
    assert (target / "generation_config.json").read_text() == "{}"
    install_model(copy, output, copy=False)
    assert target.is_symlink()
    install_model(copy, output, copy=True)
    assert not target.is_symlink()
    assert [path.name for path in output.iterdir()] == ["model"]


def test_a_folder_of_the_users_is_never_removed(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    for as_copy in (True, False):
        with pytest.raises(SettingsError, match="no model preparation made"):
            install_model(copy, tmp_path / "run", copy=as_copy)


def test_prepare_resolves_the_jobs_model(model_folder: Path, tmp_path: Path) -> None:
    assert _prepare(tmp_path, str(model_folder)) == 0
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_prepare_ends_with_2_on_wrong_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path, "no/such/folder") == 2
    assert "no folder" in capsys.readouterr().err


def test_prepare_can_find_a_wrong_task_before_anything_is_made(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path, str(model_folder), "--check-task") == 2
    assert "spec.task.path='a:B': there is no module 'a'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


PROMPTS = """
from pipelinerl_actor.task import Prompt, Task, Verdict

class Base(Task):
    async def verify(self, prompt, answer):
        return Verdict(1.0)

class Long(Base):
    def prompt(self, index):
        return Prompt.of("7" * (100 + index))

class OneShort(Long):
    def prompt(self, index):
        return Prompt.of("7") if index == 3 else super().prompt(index)

class Broken(Base):
    def prompt(self, index):
        raise KeyError(f"no problem {index}")

class OwnRollout(Long):
    async def rollout(self, rollout):
        return await rollout.verify(await rollout.chat([{"role": "user", "content": "7"}]))
"""


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt_tasks.py").write_text(PROMPTS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("prompts")
def test_a_task_whose_prompts_do_not_fit_the_context_is_refused_with_the_numbers(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path, str(model_folder), "--check-task", task="prompt_tasks:Long") == 2
    message = capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    around = len(chat_token_ids(tokenizer, [{"role": "user", "content": "7"}])) - 1
    assert (
        "model.maxModelLen=64 is too small for the prompts of spec.task.path='prompt_tasks:Long'"
        in message
    )
    assert (
        f"with task.sampling.maxTokens=8: of the first 32 the shortest has {100 + around} tokens"
        in message
    )
    assert (
        f"the longest {131 + around}. Set model.maxModelLen to at least {139 + around}" in message
    )


@pytest.mark.usefixtures("prompts")
def test_a_task_of_which_no_prompt_can_be_made_is_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path, str(model_folder), "--check-task", task="prompt_tasks:Broken") == 2
    assert (
        "none of its first 32 prompts can be used: prompt(0) raises KeyError: 'no problem 0'"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("prompts")
def test_prompts_that_will_be_dropped_are_told_and_a_rollout_of_its_own_is_left_alone(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prepare(tmp_path, str(model_folder), "--check-task", task="prompt_tasks:OneShort") == 0
    assert (
        "31 of the first 32 prompts leave no room for task.sampling.maxTokens=8"
        in capsys.readouterr().err
    )
    assert (
        _prepare(tmp_path, str(model_folder), "--check-task", task="prompt_tasks:OwnRollout") == 0
    )


def _prepare(tmp_path: Path, uri: str, *more: str, task: str = "a:B") -> int:
    job = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"uri": uri, "maxModelLen": 64},
            "task": {"path": task, "sampling": {"maxTokens": 8}},
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    return prepare(
        [
            "--job",
            str(tmp_path / "job.yaml"),
            "--output",
            str(tmp_path / "run"),
            "--cache",
            str(tmp_path / "cache"),
            *more,
        ]
    )
