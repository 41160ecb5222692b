"""`pipelinerl plan` from the command line's side; the model itself has its tests in the planner."""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from pipelinerl_cli.plan import add_arguments, run
from pipelinerl_cli.report.charts import svg_file
from pipelinerl_cli.report.svg import Axis, Line
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import parse_job

JOB = {
    "apiVersion": "pipelinerl.dev/v1alpha1",
    "kind": "PipelineRLJob",
    "metadata": {"name": "planned"},
    "spec": {
        "model": {"uri": "hf://some/model", "maxModelLen": 4096},
        "task": {"path": "a.b:C", "groupSize": 16, "sampling": {"maxTokens": 2048}},
        "algorithm": {"groupsPerStep": 64},
        "staleness": {"policy": "slack", "eta": 2},
        "actors": {
            "replicas": 8,
            "generatorsPerReplica": 2,
            "gpusPerReplica": 4,
            "generator": {"tensorParallelSize": 2},
        },
        "trainers": {"replicas": 4, "processesPerNode": 8},
    },
}


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command(*arguments, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def write_job(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**JOB, "spec": {**JOB["spec"], **changes}}))  # type: ignore[dict-item]
    return path


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, "--max-lag", "133")
    assert list(document) == ["assumed", "frontier", "conventional", "chosen", "settings"]
    assert document["assumed"] == {
        "--gpus": "128",
        "--batch": "128",
        "--lengths": "uniform:1:2048",
        "--tau": "4.92",
        "--utilization": "an H100's",
    }
    assert all(
        list(point) == ["H", "I", "g_max", "g_max_exact", "r_gen", "r_train", "r", "speedup"]
        for point in document["frontier"]
    )
    assert list(document["conventional"]) == ["r_gen", "r_train", "r"]
    assert max(point["g_max"] for point in document["frontier"]) <= 133
    assert (document["chosen"]["H"], document["chosen"]["I"]) == (192, 44)
    assert document["conventional"]["r_gen"] == pytest.approx(18.3, rel=0.001)


def test_table_marks_the_choice_and_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    shown = capsys.readouterr().out
    marked = [line.split() for line in shown.splitlines() if line.startswith(">")]
    assert [line[1:5] for line in marked] == [["132", "131.94", "192", "44"]]
    spec = yaml.safe_load(shown.partition("# for the job file")[2])["spec"]
    assert spec["actors"]["replicas"] == 44
    assert spec["actors"]["generator"]["maxRunningRequests"] == 192
    assert spec["trainers"]["replicas"] * spec["trainers"]["processesPerNode"] == 84
    assert spec["staleness"] == {"policy": "areal", "eta": 132}


def test_lag_that_no_study_covers_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    warned = "warning: lag 132 is chosen for its speed alone, and no study covers a longer lag than"
    assert warned in capsys.readouterr().out
    assert command("--max-lag", "32") == 0
    assert "warning" not in capsys.readouterr().out


def test_what_is_assumed_is_said_with_how_to_give_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    shown = capsys.readouterr().out
    assert (
        "assumed (the paper's case study): --gpus 128, --batch 128, --lengths uniform:1:2048, "
        "--tau 4.92, " in shown
    )
    assert (
        "--max-lag any, for the greatest speed-up\nfor your own numbers give --job job.yaml"
        in shown
    )
    command(
        "--job",
        str(write_job(tmp_path / "job.yaml")),
        "--lengths",
        "uniform:1:100",
        "--tau",
        "5",
        "--max-lag",
        "4",
    )
    assert (
        "assumed (beside what the job says): --utilization an H100's\n" in capsys.readouterr().out
    )


def test_job_gives_the_inputs_and_takes_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path / "job.yaml")
    document = planned(capsys, "--job", str(path), "--max-lag", "8")
    by_flags = planned(capsys, "--gpus", "64", "--batch", "1024", "--max-lag", "8")
    assert document["conventional"] == by_flags["conventional"]
    assert all(point["I"] % 4 == 0 for point in document["frontier"])
    settings, point = document["settings"], document["chosen"]
    assert settings["staleness"] == {"policy": "slack", "eta": point["g_max"]}
    assert settings["actors"]["replicas"] * 4 == point["I"]
    assert settings["actors"]["generator"] == {
        "tensorParallelSize": 2,
        "maxRunningRequests": 2 * point["H"],
    }
    assert settings["algorithm"]["groupsPerStep"] == 64
    spec: Any = JOB["spec"]
    merged = {
        **spec,
        **{name: {**spec.get(name, {}), **section} for name, section in settings.items()},
    }
    merged["task"] = {**spec["task"], **settings["task"]}
    parsed = parse_job({**JOB, "spec": merged}, "merged").spec
    assert parsed.actors.generator.max_running_requests == 2 * point["H"]


def test_job_that_scales_by_itself_has_the_gpus_of_as_many_actors_as_there_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec: Any = JOB["spec"]
    scaling = {
        "actors": {**spec["actors"], "replicas": 2, "maxReplicas": 8},
        "autoscale": {"enabled": True},
    }
    path = write_job(tmp_path / "job.yaml", **scaling)
    by_flags = planned(
        capsys, "--gpus", "64", "--batch", "1024", "--max-lag", "8"
    )  # 8 actors of 4, 4 nodes of 8
    assert (
        planned(capsys, "--job", str(path), "--max-lag", "8")["conventional"]
        == by_flags["conventional"]
    )


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan.svg", "plan.html"):
        assert command("--plot", str(tmp_path / name)) == 0
    svg = (tmp_path / "plan.svg").read_text()
    root = ElementTree.fromstring(svg)
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
    heights = [float(pair.split(",")[1]) for pair in lines[0].attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)
    assert svg in (tmp_path / "plan.html").read_text()


def test_lines_have_bands_and_small_numbers_fill_the_chart() -> None:
    line = Line("a", [0.0, 4.0], [0.0, 0.011])
    band = Line("a", [0.0, 4.0], [0.0, 0.019], 0, "band", [0.0, -0.01])
    y = Axis("y", low=0, cuts=True)
    root = ElementTree.fromstring(svg_file("t", Axis("x", low=0), y, [line, band]))
    (polygon,) = root.findall("{http://www.w3.org/2000/svg}polygon")
    heights = [float(pair.split(",")[1]) for pair in polygon.attrib["points"].split()]
    # 214 to 12 for 0 to 0.02; values below 0 are drawn there
    assert heights == [214.0, 22.1, 214.0, 214.0]
    assert root.find("{http://www.w3.org/2000/svg}circle") is None


def test_measured_speed_of_the_trainer_gives_tau(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "u.json"
    points = [{"h": h, "tokens_per_second": 10.0 * h, "utilization": h / 256} for h in (1, 64, 256)]
    file.write_text(json.dumps({"peak_tokens_per_second": 2560.0, "points": points}))
    by_speed = planned(capsys, "--utilization", str(file), "--train-tokens-per-second", "512")
    by_tau = planned(capsys, "--utilization", str(file), "--tau", "5")
    assert by_speed == by_tau
    assert command("--utilization", str(file)) == 0
    assert "tokens/s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1"], "--gpus 1 must be at least 2"),
        (
            ["--gpus", "100000000"],
            "7,099,999,929 pairs of H and I are more than the 5,000,000 that are searched",
        ),
        (
            ["--max-running", "1000000000"],
            "--gpus 128 with --max-running 1000000000: 15,875,000,889 pairs",
        ),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (
            ["--batch", "100", "--group-size", "8"],
            "--batch 100 must be a multiple of the group size 8",
        ),
        (["--group-size", "0"], "--group-size 0 must be at least 1"),
        (["--tau", "0"], "--tau 0 must be a number above 0"),
        (["--tau", "nan"], "--tau nan must be a number above 0"),
        (["--train-tokens-per-second", "5"], "how long a flash is must be known"),
        (["--lengths", "uniform:5:2"], "needs 1 <= least <= most"),
        (["--lengths", "uniform:a:b"], "invalid literal"),
        (["--lengths", "normal:3"], "expected uniform:LEAST:MOST"),
        (["--lengths", "lognormal:5:0:9"], "needs median > 0, 0 < sigma"),
        (["--lengths", "missing.csv"], "missing.csv"),
        (["--max-lag", "0"], "--max-lag 0 must be at least 1"),
        (
            ["--max-lag", "1", "--gpus", "512", "--batch", "1"],
            "no pair of H and I keeps --max-lag 1",
        ),
        (["--plot", "chart.png"], "--plot chart.png: must end in .svg or .html"),
        (["--plot", "/nowhere/chart.svg"], "--plot /nowhere/chart.svg: cannot be written"),
        (["--utilization", "missing.json"], "--utilization missing.json: cannot be read"),
        (["--job", "missing.yaml"], "missing.yaml: there is no such file"),
    ],
)
def test_what_makes_no_sense_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        command(*arguments)
    assert message in str(caught.value)


def test_job_without_gpus_asks_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path / "job.yaml", actors={"replicas": 1})
    with pytest.raises(SettingsError, match=r"actors\.gpusPerReplica=0"):
        command("--job", str(path))
    assert planned(capsys, "--job", str(path), "--gpus", "8")["settings"]["task"] == {
        "groupSize": 16
    }


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


ONE_NODE = {
    "actors": {"replicas": 4, "gpusPerReplica": 1},
    "trainers": {"processesPerNode": 4, "microBatchTokens": 12288},
}


def test_a_job_that_fits_its_gpus(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path / "job.yaml", **ONE_NODE)
    flags = ("--job", str(job), "--gpu-memory", "85", "--model", str(model))
    assert command(*flags) == 0
    printed = capsys.readouterr().out
    assert "7.62 billion parameters in bfloat16; 4 trainer ranks at ZeRO 3" in printed
    assert printed.endswith("\nfits\n")
    assert command(*flags, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    parts = document["trainer rank 0"]
    assert parts.pop("total") == sum(parts.values()) < document["gpu_bytes"]
    assert document["faults"] == []


def test_a_job_that_does_not_fit_says_what_helps(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainers = {**ONE_NODE["trainers"], "activationCheckpointing": False}
    job = write_job(tmp_path / "job.yaml", **{**ONE_NODE, "trainers": trainers})
    assert command("--job", str(job), "--gpu-memory", "85", "--model", str(model)) == 1
    printed = capsys.readouterr().out
    assert "does not fit: trainer rank 0 needs" in printed
    assert "set trainers.activationCheckpointing=true" in printed


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--gpu-memory", "80"), "--gpu-memory needs --job FILE"),
        (("--job", "JOB", "--gpu-memory", "0"), "--gpu-memory 0 must be a number above 0"),
        (("--job", "JOB", "--gpu-memory", "80"), "give --model FOLDER"),
    ],
)
def test_memory_needs_a_job_a_size_and_a_model(
    flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    job = str(write_job(tmp_path / "job.yaml", **ONE_NODE))
    with pytest.raises(SettingsError, match=says):
        command(*(job if flag == "JOB" else flag for flag in flags))
