"""What was recorded replays to the same decisions, for every policy; what was changed afterwards is
found.
"""

import json
import random
from typing import Any

import pytest
from staleness_fakes import FakeRun
from test_staleness_invariants import CASES, Case

from pipelinerl_staleness.policy import EngineLoad, Policy
from pipelinerl_staleness.recording import Record, recorded, replay
from pipelinerl_staleness.registry import POLICIES, make_policy, name_of, parse_policy_settings


class RecordedRun(FakeRun):
    """Records its policies' calls and answers as they are after a round trip through JSON."""

    def __init__(self, name: str, parameters: dict[str, Any], groups_per_step: int) -> None:
        self.records: list[Record] = []
        super().__init__(name, parameters, groups_per_step)

    def _new_policy(self) -> Policy:
        return recorded(super()._new_policy(), self._write)

    def _write(self, *record: Any) -> None:
        method, arguments, answer = json.loads(json.dumps(record))
        self.records.append((method, arguments, answer))


def recording(case: Case, seed: int = 0) -> list[Record]:
    run = RecordedRun(*case, 2)
    for byte in random.Random(seed).randbytes(200):
        run.event(byte)
    run.restart()
    run.run_steps(4)
    return run.records


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}"
)
def test_every_policy_replays_over_a_restart(case: Case) -> None:
    records = recording(case)
    outcome = replay(records)
    assert outcome.difference is None
    assert outcome.num_events + outcome.num_decisions == len(records) - 2  # two policies were begun
    assert outcome.num_decisions > 20


def test_a_changed_answer_or_a_missing_event_is_found() -> None:
    records = recording(("roll", {"rho": 1}))
    number = next(
        number for number, record in enumerate(records) if record[0] == "take" and record[2][0]
    )
    method, arguments, (groups, dropped, reason) = records[number]
    changed = [*records]
    changed[number] = (method, arguments, [groups[::-1], dropped, reason])
    difference = replay(changed).difference
    assert difference is not None
    assert difference.number == number
    assert (
        f"was answered {[groups[::-1], dropped, reason]} then and {[groups, dropped, reason]} now"
        in difference.what
    )
    first_admitted = next(
        number for number, record in enumerate(records) if record[0] == "admitted"
    )
    assert replay(records[:first_admitted] + records[first_admitted + 1 :]).difference is not None


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([("take", [0], [[], [], ""])], "no policy was begun"),
        ([("policy", ["no_such", {}, 2], None)], "unknown staleness policy"),
        ([("policy", ["areal", {"eta": 1}, 2], None), ("__init__", [], None)], "no such event"),
        ([("policy", ["areal", {"eta": 1}, 2], None), ("take", [], None)], "missing 1 required"),
    ],
)
def test_records_that_make_no_sense_are_named(records: list[Record], what: str) -> None:
    difference = replay(records).difference
    assert difference is not None
    assert what in difference.what


def test_a_question_is_recorded_once_until_something_happens() -> None:
    written: list[str] = []
    policy = recorded(
        make_policy(POLICIES["areal"](), 2), lambda method, *_: written.append(method)
    )
    assert policy.may_admit()
    assert policy.may_admit()
    policy.observe(EngineLoad(None, 0, 0, 1.0))
    assert policy.may_admit()
    assert written == ["policy", "may_admit", "observe", "may_admit"]
    assert policy.max_outstanding() == 4


def test_settings_know_their_policys_name() -> None:
    assert [name_of(parse_policy_settings(name, {})) for name in sorted(POLICIES)] == sorted(
        POLICIES
    )
