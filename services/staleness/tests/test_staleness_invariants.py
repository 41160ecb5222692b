"""What every policy keeps on arbitrary event traces: bound, liveness, credit, determinism, restart,
end of data.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from staleness_fakes import GROUP_SIZE, FakeRun

from pipelinerl_staleness.registry import POLICIES

Case = tuple[str, dict[str, Any]]

CASES: list[Case] = [
    *(("areal", {"eta": eta}) for eta in (0, 2)),
    ("areal", {"eta": 2, "max_concurrent": 2}),
    *(("conventional", {"steps_per_generation": steps}) for steps in (1, 3)),
    *(("skyrl", {"max_staleness_steps": eta}) for eta in (0, 2)),
    *(
        ("verl_drop", {"eta": eta, "num_warmup_batches": warmup})
        for eta, warmup in ((1, 0), (1, 2), (2, 0.5), (3, 2))
    ),
    *(
        ("verl_wait", {"eta": eta, "num_warmup_batches": w})
        for eta, w in ((1, 0), (1, 2), (2, 0.5), (2, 2), (4, 2))
    ),
    *(("trl", {"eta": eta, "group_size": GROUP_SIZE, "queue_groups": 6}) for eta in (0, 1, 3)),
    ("trl", {"eta": 2, "group_size": GROUP_SIZE, "slots": "trajectory"}),
    ("trl", {"eta": 1, "prefetch": True}),
    *(
        ("openrlhf", {"async_queue_size": q, "partial_rollout": p})
        for q in (1, 3)
        for p in (False, True)
    ),
    *(("openrlhf_article", {"async_queue_size": q}) for q in (1, 3)),
    *(("slime", {"prefetch_factor": factor, "group_size": GROUP_SIZE}) for factor in (0.1, 1, 2.5)),
    *(("roll", {"rho": rho}) for rho in (0, 1, 3)),
    *(("roll_rlvr", {"rho": rho}) for rho in (0, 1, 3)),
    *(
        ("prime_rl", {"eta": eta, "group_size": GROUP_SIZE, "max_inflight": 16})
        for eta in (0, 1, 3)
    ),
    *(
        ("dressage", {"keep_versions": keep, "scope": scope})
        for keep in (0, 1, 2)
        for scope in ("group", "trajectory")
    ),
    ("dressage", {"max_version_switches": 1, "max_queue": 1}),
    *(("nemo_windowed", {"eta": eta}) for eta in (0, 1, 3)),
    ("nemo_windowed", {"eta": 1, "sample_freshest_first": True, "max_buffered_rollouts": 20}),
    *(
        (f"nemo_{name}", {"eta": eta})
        for name in ("weight_fifo", "ready_first", "in_order")
        for eta in (0, 1, 3)
    ),
    ("nemo_weight_fifo", {"eta": 2, "max_inflight_prompts": 1}),
    *(
        ("layered", {"eta": eta, "layer2": l2, "layer3": l3})
        for eta in (0, 2)
        for l2 in (False, True)
        for l3 in (False, True)
    ),
    ("layered", {"eta": 1, "layer1": False}),
    *(("psrl", {"eta": eta}) for eta in (0, 1, 3)),
    *(("slack", {"eta": eta, "stream": stream}) for eta in (0, 1, 3) for stream in (False, True)),
    ("slack", {"eta": 2, "c_busy": 100, "c_idle": 100, "adaptive": False}),
]

EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
traces = st.binary(min_size=20, max_size=250)
batches = st.integers(1, 3)
each_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}"
)


def driven(case: Case, batch: int, trace: bytes, lagging: bool) -> FakeRun:
    run = FakeRun(*case, batch, lagging)
    for byte in trace:
        run.event(byte)
    return run


def test_every_policy_is_covered() -> None:
    assert {name for name, _ in CASES} == set(POLICIES)


@each_case
@EXAMPLES
@given(trace=traces, batch=batches, lagging=st.booleans())
def test_bound_books_and_liveness(case: Case, batch: int, trace: bytes, lagging: bool) -> None:
    """The run asserts the bound at every take and the books after every event; then training must
    continue.
    """
    driven(case, batch, trace, lagging).run_steps(3)


_STRICT = [
    case
    for case in CASES
    if FakeRun(*case, 1).policy.bound() is not None and case[0] != "conventional"
]


@pytest.mark.parametrize("case", _STRICT, ids=str)
def test_promised_bound_is_as_low_as_it_can_be(case: Case) -> None:
    """Random traces reach the bound, or half of it where only a rare order of events reaches it."""
    oldest = 0
    for seed in range(150):
        rng = random.Random(seed)
        run = FakeRun(*case, rng.randint(1, 2), lagging=seed % 2 == 1)
        for byte in rng.randbytes(300):
            run.event(byte)
        oldest = max(oldest, run.oldest)
    bound = run.policy.bound()
    assert bound is not None
    assert bound / 2 <= oldest <= bound


_OVERTAKING: list[Case] = [
    ("areal", {"eta": 1}),
    ("skyrl", {"max_staleness_steps": 1}),
    ("openrlhf_article", {"async_queue_size": 2}),
    ("slime", {"prefetch_factor": 1, "group_size": GROUP_SIZE}),
    ("dressage", {"keep_versions": 2}),
    ("nemo_ready_first", {"eta": 1}),
    ("layered", {"eta": 1, "layer2": False, "layer3": False}),
]


@pytest.mark.parametrize("case", _OVERTAKING, ids=str)
def test_without_a_bound_a_slow_group_is_overtaken_for_ever(case: Case) -> None:
    """One group never finishes while the rest does; when it does at last it is trained, as old as
    the run.
    """
    run = FakeRun(*case, 2)
    assert run.policy.bound() is None
    run.admit(1000)
    straggler = run.dispatched[0]
    held = run.running.pop(straggler)
    held.first_tokens.append(0)
    run.policy.first_token(straggler, 0)
    for _ in range(20):
        run.observe(0)
        run.admit(1000)
        while run.running:
            run.finish(0)
        for _ in range(3):
            run.train()
        run.publish()
    assert run.step >= 5
    run.running[straggler] = held
    run.finish(len(run.running) - 1)
    while straggler in run.ready and run.step < 60:
        run.admit(1000)
        run.finish(0)
        run.train()
        run.publish()
    assert run.oldest >= 5


@each_case
@EXAMPLES
@given(trace=traces, batch=batches, behind=st.integers(0, 1))
def test_restart_keeps_the_bound_and_goes_on(
    case: Case, batch: int, trace: bytes, behind: int
) -> None:
    """Groups are journalled before the ledger's own record, so that one may be a version behind."""
    run = driven(case, batch, trace, lagging=False)
    run.restart(behind)
    for byte in trace[::-1]:
        run.event(byte)
    run.run_steps(2)


@each_case
@settings(EXAMPLES, max_examples=10)
@given(trace=traces, batch=batches)
def test_same_trace_gives_same_decisions(case: Case, batch: int, trace: bytes) -> None:
    assert driven(case, batch, trace, True).log == driven(case, batch, trace, True).log


@each_case
@EXAMPLES
@given(trace=traces, batch=batches)
def test_all_credit_comes_back(case: Case, batch: int, trace: bytes) -> None:
    """After every outstanding group is lost, as many are admitted as by a fresh policy at the same
    step and version.
    """
    run = driven(case, batch, bytes(byte for byte in trace if byte % 16 != 15), lagging=False)
    while run.in_training:
        run.train()
        run.admit(1)
        run.finish(0)
        run.publish()
    while run.running or run.ready:
        run.lose(0)
    fresh = FakeRun(*case, batch)
    fresh.served = run.served
    fresh.policy.recover(run.step, run.served)
    assert run.admit(1000) == fresh.admit(1000)


@settings(EXAMPLES, max_examples=200)
@given(trace=traces, batch=batches, eta=st.integers(0, 3))
def test_roll_rlvr_decides_as_weight_fifo(trace: bytes, batch: int, eta: int) -> None:
    runs = (
        FakeRun("roll_rlvr", {"rho": eta}, batch),
        FakeRun("nemo_weight_fifo", {"eta": eta}, batch),
    )
    for byte in trace:
        for run in runs:
            run.event(byte)
    roll, fifo = ([getattr(decision, "groups", decision) for decision in run.log] for run in runs)
    assert roll == fifo


@each_case
@EXAMPLES
@given(trace=traces, batch=batches)
def test_end_of_data_drains(case: Case, batch: int, trace: bytes) -> None:
    """No group comes any more: what is outstanding is trained or dropped until less than a batch
    (or phase) is left.
    """
    run = driven(case, batch, trace, lagging=False)
    for index in range(len(run.running)):
        run.finish(index * 5)
    for _ in range(4 * len(run.ready) + 20):
        run.train()
        run.publish()
    phase = batch * int(str(case[1].get("steps_per_generation", 1)))
    assert len(run.ready) < phase
    assert run.policy.may_publish()


# After a restart these decide from what the ledger restores alone. The others have memory of their
# own: prime_rl and an
# adaptive slack their caps, dressage the order in which versions were seen, psrl its buffers.
_MEMORYLESS = [case for case in CASES if case[0] not in ("prime_rl", "dressage", "psrl", "slack")]
_MEMORYLESS.append(
    ("slack", {"eta": 2, "c_busy": 4, "c_idle": 4, "adaptive": False, "stream": False})
)


@pytest.mark.parametrize("case", _MEMORYLESS, ids=str)
@EXAMPLES
@given(trace=traces, rest=traces, batch=batches)
def test_restart_changes_no_decision(case: Case, batch: int, trace: bytes, rest: bytes) -> None:
    going_on, restarted = driven(case, batch, trace, False), driven(case, batch, trace, False)
    for run in (going_on, restarted):
        if run.training:
            run.train()
    restarted.restart()
    for byte in rest:
        going_on.event(byte)
        restarted.event(byte)
    assert going_on.log == restarted.log
    assert going_on.dispatched == restarted.dispatched
