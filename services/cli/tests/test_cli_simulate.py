"""`pipelinerl simulate` from the command line's side."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.report.charts import Bar, Part, bar_file
from pipelinerl_cli.report.svg import Axis
from pipelinerl_planner.lengths import ConstructedLengths, LognormalLengths, read_trace
from pipelinerl_staleness.registry import POLICIES

KEYS = [
    "policy",
    "settings",
    "max_staleness",
    "bound",
    "effective_tokens_per_second",
    "total_tokens_per_second",
    "waste",
    "waste_l2",
    "waste_l3",
    "preemptions_per_trajectory",
    "reprefill_tokens_per_trajectory",
    "drop_enrichment",
    "wall_seconds",
]
SMALL = ["--steps", "2", "--groups-per-step", "2", "--group-size", "2"]


def command(*arguments: str) -> int:
    return main(["simulate", *arguments])


def records(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert command(*arguments, "--json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_all_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = records(capsys, *SMALL)
    assert [one["policy"] for one in found] == sorted(POLICIES)
    assert all(list(one) == KEYS for one in found)


def test_table_says_what_was_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SMALL, "--policy", "areal") == 0
    first, head, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("simulated: --preset article, 2 steps of 2 groups of 2 ")
    assert head.split()[:2] == ["policy", "main"]


def test_main_sweeps_each_policys_first_parameter_and_skips_what_it_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(*SMALL, "--policy", "verl_drop,roll", "--sweep", "main=0:2", "--json") == 0
    shown = capsys.readouterr()
    settings = [one["settings"] for one in json.loads(shown.out)]
    assert settings == [
        {"eta": 1, "num_warmup_batches": 1},
        {"eta": 2, "num_warmup_batches": 1},
        *({"rho": rho} for rho in range(3)),
    ]
    assert "skipped verl_drop: eta=0 must be a whole number of at least 1" in shown.err


def test_two_sweeps_make_a_grid_and_parameters_are_fixed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweeps = ("--sweep", "main=1,3", "--sweep", "c_idle=4,6", "--parameter", "stream=false")
    found = records(capsys, *SMALL, "--policy", "slack", *sweeps, "--details", "--seeds", "0:1")
    assert [
        (one["settings"]["eta"], one["settings"]["c_idle"], one["details"]["seed"]) for one in found
    ] == [(eta, c_idle, seed) for eta in (1, 3) for c_idle in (4, 6) for seed in (0, 1)]
    assert not any(one["settings"]["stream"] for one in found)
    assert (
        sum(found[0]["details"]["tokens_by_staleness"].values())
        == found[0]["details"]["trained_tokens"]
    )


def test_costs_can_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (
        records(capsys, *SMALL, "--policy", "areal", "--cluster", f"train_tokens_per_s={speed}")[0]
        for speed in (100, 1e9)
    )
    assert slow["wall_seconds"] > fast["wall_seconds"] + 2 * 100


def test_table_names_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SMALL, "--policy", "areal,slack") == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["policy", "main", "seed", "max/bound"]
    assert lines[1].startswith("areal")
    assert "/none" in lines[1]
    assert "/3" in lines[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fifo"], "unknown staleness policy 'fifo'"),
        (
            ["--policy", "roll", "--parameter", "eta=1"],
            "policy 'roll' has no parameter 'eta': it has rho",
        ),
        (
            ["--policy", "roll", "--sweep", "main=3:1"],
            "range 3:1 must be two whole numbers in order",
        ),
        (["--policy", "roll", "--sweep", "main"], "must have the form name=value"),
        (
            ["--policy", "roll", "--cluster", "speed=1"],
            "--cluster speed: choose one of num_engines",
        ),
        (
            ["--policy", "roll", "--cluster", "kv_tokens=many"],
            "kv_tokens='many' must be a whole number of at least 16",
        ),
        (
            ["--policy", "roll", "--cluster", "num_engines=1.5"],
            "num_engines=1.5 must be a whole number of at least 1",
        ),
        (
            ["--policy", "roll", "--cluster", "publish_s=NaN"],
            "publish_s=nan must be a number of at least 0",
        ),
        (
            ["--policy", "roll", "--cluster", "train_tokens_per_s=1e400"],
            "train_tokens_per_s=inf must be a number above 0",
        ),
        (["--policy", "roll", "--cluster", "keeps_kv=1"], "keeps_kv=1 must be true or false"),
        (["--policy", "roll", "--cluster", "pause_s=9"], "pause_s=9 must be at most publish_s=8.0"),
        (["--policy", "roll", "--seed", "1.5"], "--seed=1.5 must be a whole number of at least 0"),
        (["--policy", "roll", "--seed", "0,x"], "--seed='x' must be a whole number of at least 0"),
        (
            ["--policy", "roll", "--cluster", "kv_tokens=1024"],
            "kv_tokens=1024 cannot hold one sequence of",
        ),
        (["--policy", "roll", "--steps", "0"], "--steps 0 must be at least 1"),
        (["--policy", "roll", "--trace", "missing.csv"], "missing.csv"),
        (
            ["--policy", "roll", "--plot", "chart.png", *SMALL],
            "chart.png: must end in .svg or .html",
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("pipelinerl simulate: ")
    assert message in error


def test_plot_has_one_panel_per_policy_and_hatched_waste(tmp_path: Path) -> None:
    for name in ("chart.svg", "chart.html"):
        assert (
            command(
                *SMALL,
                "--policy",
                "roll,trl",
                "--sweep",
                "main=1:2",
                "--plot",
                str(tmp_path / name),
            )
            == 0
        )
    svg = (tmp_path / "chart.svg").read_text()
    ElementTree.fromstring(svg)
    assert svg.count('class="title"') == 1 + 2
    assert svg.count("<pattern") == 2
    assert svg in (tmp_path / "chart.html").read_text()


def test_bars_are_as_high_as_their_numbers() -> None:
    waste = [Part("L2", 50.0, 1, is_hatched=True), Part("L3", 50.0, 5, is_hatched=True)]
    trained = [Part("0", 300.0, 0, opacity=0.5), Part("1", 100.0, 0)]
    svg = ElementTree.fromstring(
        bar_file("t", Axis("tokens/s"), {"p": [Bar("1", [*trained, *waste], "max 1")]})
    )
    rectangles = [node for node in svg.iter("{http://www.w3.org/2000/svg}rect") if len(node)]
    heights = [float(node.attrib["height"]) for node in rectangles]
    assert heights == pytest.approx([202 * share for share in (0.6, 0.2, 0.1, 0.1)], abs=0.06)
    assert [node.attrib["fill"] for node in rectangles][2:] == ["url(#hatch1)", "url(#hatch5)"]


def test_traces_in_csv_and_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", 10, 40), ("a", 10, 60), ("b", 12, 50), ("b", 12, 90)]
    (tmp_path / "t.csv").write_text(
        "group,prompt_tokens,response_tokens\n" + "".join(f"{g},{p},{r}\n" for g, p, r in rows)
    )
    lines = (json.dumps({"prompt_tokens": p, "response_tokens": r}) + "\n" for _, p, r in rows)
    (tmp_path / "t.jsonl").write_text("".join(lines))
    for name in ("t.csv", "t.jsonl"):
        trace = read_trace(tmp_path / name, 2)
        assert trace.groups == ((10, (40, 60)), (12, (50, 90)))
        assert trace.group(3) == trace.group(1)
        found = records(
            capsys, *SMALL, "--policy", "areal", "--details", "--trace", str(tmp_path / name)
        )
        assert found[0]["details"]["trained_tokens"] == 2 * 240


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.txt", "1", "must end in .csv or .jsonl"),
        ("t.csv", "length\n5\n", "line 2: response_tokens"),
        ("t.csv", "response_tokens\n5\n0\n", "line 3: response_tokens=0 must be at least 1"),
        ("t.csv", "response_tokens\n5\n5\n5\n", r"groups of \[1, 2\] trajectories, expected 2"),
        ("t.jsonl", "\n", "no line with response_tokens"),
        ("t.jsonl", "{nonsense}\n", r"t\.jsonl line 1"),
        ("t.jsonl", '{"response_tokens": 5}\n[1]\n', r"t\.jsonl line 2"),
        ("t.csv", "response_tokens\n\xff", r"t\.csv is not text"),
    ],
)
def test_bad_traces_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / name, 2)


def test_lengths_are_the_same_in_any_order_and_capped() -> None:
    lengths = LognormalLengths(5)
    forward = [lengths.group(index) for index in (0, 300, 1)]
    again = LognormalLengths(5)
    assert [again.group(index) for index in (300, 0, 1)] == [forward[1], forward[0], forward[2]]
    drawn = [length for index in range(2000) for length in lengths.group(index)[1]]
    assert max(drawn) == 38912
    assert sum(drawn) / len(drawn) == pytest.approx(10_800, rel=0.05)


def test_constructed_load_has_two_slow_batches() -> None:
    lengths = ConstructedLengths(0, groups_per_step=16)
    slow = [index for index in range(80) if max(lengths.group(index)[1]) > 700]
    assert slow == list(range(16, 48))
    assert all(25_000 <= length <= 31_000 for index in slow for length in lengths.group(index)[1])
