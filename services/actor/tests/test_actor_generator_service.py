"""Starting a generator: what is wrong is said in one line, with exit status 2; what is not needed
is not loaded.
"""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from actor_generator_harness import Client, GeneratorProcess, write_job

from pipelinerl_actor.generator.merged_weights import MergedWeights
from pipelinerl_actor.generator.service import make_engine, role_of
from pipelinerl_actor.generator.vllm_options import prepare_environment
from pipelinerl_actor.generator.weight_layout import ManifestMismatch, WeightLayout
from pipelinerl_actor.models.tiny import make_tiny_model
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import parse_job
from pipelinerl_weights.manifest import Manifest, TensorSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    make_tiny_model(folder / "model")
    return folder


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelinerl_actor.generator", *flags]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_help_is_instant_and_names_every_flag() -> None:
    code = (
        "import sys\nfrom pipelinerl_actor.generator.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    for flag in ("--model", "--serve-initial", "--job", "--listen", "--token-file"):
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("engine", "flags", "complaint"),
    [
        ({}, ("--model", "/nowhere"), "/nowhere"),
        ({}, ("--listen", "127.0.0.1:taken"), "--listen 127.0.0.1:taken"),
        ({}, ("--token-file", "/nowhere"), "--token-file /nowhere"),
        ({}, ("--name", "reference-0"), "no spec.reference"),
        pytest.param(
            {"engine": "vllm", "engineArgs": {"max_modle_len": 3}},
            (),
            "vLLM has no argument max_modle_len",
            marks=pytest.mark.vllm,
        ),
    ],
)
def test_wrong_settings_end_with_status_2_and_one_line(
    folder: Path, tmp_path: Path, engine: dict[str, object], flags: tuple[str, ...], complaint: str
) -> None:
    job = write_job(tmp_path, **{"engine": "transformers", **engine})
    done = start("--job", str(job), "--output", str(folder), *flags)
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_an_occupied_port_is_named(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = start(
            "--job",
            str(write_job(tmp_path, engine="transformers")),
            "--output",
            str(folder),
            "--listen",
            address,
        )
    assert done.returncode == 2
    assert f"--listen {address}: cannot listen there" in done.stderr


async def test_without_weights_of_the_job_it_lives_but_does_not_serve(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(folder / "model")
    process = GeneratorProcess(tmp_path, write_job(tmp_path, engine="transformers"))
    try:
        client = Client(process.url)
        assert (await client.call("GET", "/health"))[0] == 200
        assert (await client.call("GET", "/ready"))[0] == 503
        assert (await client.call("POST", "/v1/chat/completions", {"prompt_token_ids": [40]}))[
            0
        ] == 503
        assert process.stop() == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("name", "takes_updates"),
    [("generator-0-0", True), ("reference-0", False), ("evaluator-x", False)],
)
def test_only_the_actors_generators_are_prepared_for_updates(
    folder: Path, tmp_path: Path, name: str, takes_updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep the frozen weights that adapters are merged into open, and have room for a second
    copy.
    """
    from pipelinerl_actor.generator import transformers_engine

    opened: list[Path] = []

    def opening(folder: Path, scale: float) -> MergedWeights:
        opened.append(folder)
        return MergedWeights(folder, scale)

    monkeypatch.setattr(transformers_engine, "MergedWeights", opening)
    document = yaml.safe_load(write_job(tmp_path, engine="transformers").read_text())
    document["spec"]["model"]["adapter"] = {"rank": 4, "alpha": 8}
    document["spec"]["algorithm"] = {"kl": {"coefficient": 0.1}}
    document["spec"]["reference"] = {"generator": {"engine": "transformers"}}
    job = parse_job(document, "job.yaml")
    duty = role_of(job, name)
    engine = make_engine(
        job, duty.settings, folder / "model", initial_version=0, takes_updates=duty.takes_updates
    )
    assert engine.can_stage == takes_updates
    assert opened == ([folder / "model"] if takes_updates else [])


def test_the_layout_comes_from_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    layout = WeightLayout.of_folder(folder / "model")
    assert layout.shapes["lm_head.weight"] == (128, 64)
    assert not layout.optional
    tied = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    layout = WeightLayout.of_folder(tied)
    specs = [TensorSpec(name, "bfloat16", shape) for name, shape in layout.shapes.items()]
    assert all(spec.name != "lm_head.weight" for spec in specs)
    layout.check(Manifest(tuple(specs), 1024))
    layout.check(Manifest((*specs, TensorSpec("lm_head.weight", "bfloat16", (128, 64))), 1024))
    with pytest.raises(ManifestMismatch, match=r"missing: .* and \d+ more; unknown: other"):
        layout.check(Manifest((TensorSpec("other", "float32", (1,)),), 1024))


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(SettingsError, match="holds no"):
        WeightLayout.of_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{")
    with pytest.raises(SettingsError, match="not a safetensors file"):
        WeightLayout.of_folder(tmp_path)


def test_the_environment_leaves_cores_alone_and_keeps_the_users_threads() -> None:
    environ = {"OMP_NUM_THREADS": "3"}
    prepare_environment("info", on_cpu=True, environ=environ)
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environ["TORCH_COMPILE_DISABLE"] == "1"
    gpu: dict[str, str] = {}
    prepare_environment("debug", on_cpu=False, environ=gpu)
    assert not {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"} & set(gpu)
    assert gpu["VLLM_LOGGING_LEVEL"] == "DEBUG"
