import argparse
import json

import pytest

from bench import command
from bench.report import Report, Row, at_least, at_most, show


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="e2e/bench/run")
    command.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("name", ["stream", "weights", "packing", "telemetry"])
def test_every_bench_takes_json_and_quick(name: str) -> None:
    args = parse(name, "--json", "--quick")
    assert (args.bench, args.json, args.quick) == (name, True, True)


def test_a_bench_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse()
    assert "stream,weights,packing" in capsys.readouterr().err


def test_zero_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("packing", "--rounds", "0")
    assert "at least 1" in capsys.readouterr().err


def test_json_is_the_only_thing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        Report("title", {"fill": 0.5, "paced": {"staged": {"bytes": 3}}}, (Row("fill", "0.5"),)),
        as_json=True,
    )
    assert json.loads(capsys.readouterr().out) == {"fill": 0.5, "paced": {"staged": {"bytes": 3}}}


def test_a_skipped_bench_says_why_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = Report("title", skipped="no server: install it")
    show(skipped, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"skipped": "no server: install it"}
    show(skipped, as_json=False)
    assert "no server: install it" in capsys.readouterr().out


def test_rows_say_whether_the_target_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (at_least("speed", 3.5, 3), at_most("size", 13.0, 12))
    show(Report("title", {}, rows), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any("speed" in line and ">= 3 met" in line for line in lines)
    assert any("size" in line and "<= 12 missed" in line for line in lines)
