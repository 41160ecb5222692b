"""The bench of telemetry: its arithmetic, and what it counts as the run's CPU time."""

import os
import subprocess
import sys
import time

import pytest

from bench.processes import cpu_seconds, process_tree
from bench.telemetry import Load, Measured, report


def test_overhead_is_the_median_of_the_pairs() -> None:
    pairs = [
        (Measured(1000, 10, 20), Measured(1000, 10.1, 20.2)),
        (Measured(1000, 12, 20), Measured(1000, 11, 20)),
        (Measured(1000, 10, 20), Measured(1000, 12.5, 25)),
    ]
    made = report(pairs, Load(scrapes=10, bytes=1000, spans=5))
    assert made.values["overhead"] == pytest.approx(1 - 10 / 10.1)
    assert made.values["overhead_max"] == pytest.approx(0.2)
    assert made.values["overhead_min"] == pytest.approx(1 - 12 / 11)
    assert made.values["cpu_overhead"] == pytest.approx(1 - 20 / 20.2)
    assert made.values["noise"] == pytest.approx((100 - 1000 / 12) / 100)
    assert made.values["bytes_per_scrape"] == 100
    assert [row.met for row in made.rows[:2]] == [True, True]


def test_only_scrapes_between_two_answers_of_a_process_count_as_failed() -> None:
    load = Load()
    for target in ("early", "early", "steady"):
        load.unanswered(target)
    load.answered("early", 100)
    load.unanswered("early")
    load.unanswered("early")
    assert (load.failed_scrapes, load.absent_scrapes) == (0, 5)  # it may have ended
    load.answered("early", 100)
    load.unanswered("early")
    assert (load.scrapes, load.bytes, load.failed_scrapes, load.absent_scrapes) == (2, 200, 2, 4)
    load.end_run()
    load.answered("early", 100)  # of the next run's process
    assert (load.failed_scrapes, load.absent_scrapes) == (2, 4)


def tree_cpu_seconds(root: int) -> float:
    return sum(map(cpu_seconds, process_tree(root)))


def test_cpu_time_is_that_of_the_process_and_of_all_below_it() -> None:
    burn = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.5: pass"
    program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); "
        "print('done', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert tree_cpu_seconds(parent.pid) >= 0.5
        assert tree_cpu_seconds(os.getpid()) >= tree_cpu_seconds(parent.pid)
        assert process_tree(parent.pid)[0].ppid() == os.getpid()
        parent.communicate(b"\n", timeout=60)
    began = time.process_time()
    assert tree_cpu_seconds(os.getpid()) >= began * 0.5
