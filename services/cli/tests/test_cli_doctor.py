"""Every rule of `pipelinerl doctor`: fires on a run or job with its fault, and on no other one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_fakes import JOB, Change, job, run_facts, run_records

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.doctor.finding import SEVERITIES, Named
from pipelinerl_cli.doctor.rules import JOB_RULES, RUN_RULES, diagnose_job, diagnose_run
from pipelinerl_common.judgements import Severity
from pipelinerl_common.runs.facts import JobFacts, RunFacts, given_up_messages
from pipelinerl_common.runs.records import Record
from pipelinerl_common.settings import Job

WAITS = {"wait_seconds": 4.0}
NEVER_WAITS = {"wait_seconds": 0.2}
IDLE = {"requests_running": 100.0}
EVALUATED: dict[str, Any] = {
    "trainers": {"checkpoint": {"everySteps": 20}},
    "evaluation": {
        "everySteps": 20,
        "timeoutSeconds": 100,
        "sets": [{"name": "held-out", "path": "a.b:C"}],
    },
}
EVALUATIONS = {"evaluations_total{outcome=failed}": 2.0, "evaluations_total{outcome=done}": 3.0}
SCALES = {
    "actors": {"replicas": 1, "minReplicas": 1, "maxReplicas": 4},
    "autoscale": {"enabled": True},
}
LARGE_PLACES = {"actors": {"generator": {"maxRunningRequests": 512}}}

RUN_CASES: dict[str, tuple[Change, Severity, str]] = {
    "run_failed": (Change(status="failed"), Severity.CRITICAL, "failed after 40 steps"),
    "no_step_done": (
        Change(num_steps=0),
        Severity.CRITICAL,
        "no optimizer step was done in 400 s; 8160000 tokens",
    ),
    "device_lost": (
        Change(logs={"generator-0-0.log": "... ERROR generator-0-0 the GPU does not answer: lost"}),
        Severity.CRITICAL,
        "1 process reported a GPU that does not answer: generator-0-0 (lost)",
    ),
    "nothing_succeeds": (
        Change(
            num_steps=0,
            actor={
                "samples_generated_total": 0.0,
                "groups_failed_total": 20.0,
                "rollout_errors_total{reason=http_400}": 160.0,
            },
        ),
        Severity.CRITICAL,
        "no trajectory has succeeded, 640 attempts failed: http_400 640",
    ),
    "processes_silent": (
        Change(status="running", up={"silent_generator-0-0_seconds": 36.0}),
        Severity.CRITICAL,
        "1 process runs but has not answered: generator-0-0 for 36 s",
    ),
    "steps_not_finite": (
        Change(late={"skipped_steps_total": 3.0}),
        Severity.CRITICAL,
        "3 steps skipped",
    ),
    "processes_restarted": (
        Change(
            up={
                "restarts_total": 3.0,
                "restarts_actor-1_process_total": 2.0,
                "restarts_trainer-0_process_total": 1.0,
            }
        ),
        Severity.WARNING,
        "restarted 3 times: actor-1 2, trainer-0 1",
    ),
    "updates_failed": (
        Change(late={"weight_update_failures_total": 10.0}),
        Severity.WARNING,
        "10 of 50 weight updates failed",
    ),
    "groups_dropped": (
        Change(
            preprocessor={
                "groups_dropped_total{reason=stale}": 640.0,
                "groups_dropped_total{reason=expired}": 10.0,
            }
        ),
        Severity.WARNING,
        "20 % of the groups were generated for nothing: stale 640, expired 10",
    ),
    "rollouts_fail": (
        Change(actor={"rollout_errors_total{reason=verifier}": 90.0}),
        Severity.WARNING,
        "360 rollout errors for 20800",
    ),
    "sequences_overlong": (
        Change(preprocessor={"sequences_overlong_total": 7.0}),
        Severity.WARNING,
        "7 trajectories longer",
    ),
    "checkpoints_failed": (
        Change(late={"checkpoint_failures_total": 2.0}),
        Severity.CRITICAL,  # as the alert: a crash loses every step since the last good checkpoint
        "2 checkpoints",
    ),
    "evaluations_fail": (
        Change(
            spec=EVALUATED,
            status="running",
            evaluator={**EVALUATIONS, "evaluation_running_step": -1.0},
        ),
        Severity.WARNING,
        "evaluation: 2 of 5 evaluations failed",
    ),
    "memory_grows": (
        Change(
            step_s=20.0,
            step={"step_seconds": 20.0, "wait_seconds": 3.0},
            late={"memory_bytes": 16e9},
        ),
        Severity.WARNING,
        "memory of trainer-0 grew 2.0 times",
    ),
    "reward_flat": (
        Change(step={"reward_mean": 0.2}),
        Severity.CRITICAL,
        "from 0.200 to 0.200 in 40 steps",
    ),
    "ess_low": (Change(late={"ess": 0.7}), Severity.WARNING, "effective sample size is 0.70"),
    "lag_high": (Change(late={"lag_mean": 9.0}), Severity.WARNING, "9.0 steps old"),
    "groups_without_gradient": (
        Change(late={"success_mean": 0.95}),
        Severity.WARNING,
        "at least 66 % of the groups",
    ),
    "completions_cut_off": (
        Change(late={"completion_length_mean": 900.0}),
        Severity.WARNING,
        "900 tokens on average of at most 1000",
    ),
    "entropy_collapsed": (Change(late={"entropy": 0.02}), Severity.WARNING, "from 0.500 to 0.020"),
    "ratios_clipped": (Change(late={"clip_fraction": 0.3}), Severity.WARNING, "30 % of the tokens"),
    "gradients_scaled_down": (
        Change(late={"grad_norm": 20.0}),
        Severity.ADVICE,
        "20 times maxGradNorm",
    ),
    "admission_starves_generators": (
        Change(
            spec={**LARGE_PLACES, "staleness": {"eta": 3}},
            step=WAITS,
            actor={"requests_running": 250.0},
        ),
        Severity.WARNING,
        "waits 40 % of its time while 51 % of the generators' places are empty: the staleness "
        "policy lets only 2048",
    ),
    "environment_starves_generators": (
        Change(spec={"actors": {"gpusPerReplica": 0}}, step=WAITS, actor=IDLE),
        Severity.WARNING,
        "though the staleness policy allows more",
    ),
    "generation_is_slow": (
        Change(step=WAITS),
        Severity.WARNING,
        "the generators are 90 % full: generation is the bottleneck",
    ),
    "training_is_slow": (
        Change(spec={"actors": {"gpusPerReplica": 0}}, step=NEVER_WAITS, actor=IDLE),
        Severity.WARNING,
        "training is the bottleneck",
    ),
    "kv_cache_full": (
        Change(preempted=1024.0, preprocessor={"engine_kv_usage_ratio": 0.95}),
        Severity.WARNING,
        "uses 95 % of its KV cache, and a trajectory is preempted 1.9 times",
    ),
    "queue_too_deep": (
        Change(preprocessor={"queue_groups{stage=ready}": 128.0}),
        Severity.WARNING,
        "128 finished groups wait on average, 2.0",
    ),
    "updates_slower_than_steps": (
        Change(late={"publish_seconds": 12.0}),
        Severity.WARNING,
        "takes 12.00 s, a step 10.00 s",
    ),
    "updates_pause_decoding": (
        Change(step={"pause_seconds": 1.0}),
        Severity.WARNING,
        "1.000 s mean in each step, 10 %",
    ),
    "actors_uneven": (
        Change(actor_0={"tokens_generated_total": 51_000.0 * 21}),
        Severity.WARNING,
        "actor-0 generates 100 % less than the mean of 4 actors",
    ),
    "packing_uneven": (
        Change(late={"packing_imbalance": 0.3}),
        Severity.WARNING,
        "30 % fewer tokens than the fullest",
    ),
    "packing_loose": (Change(late={"packing_fill": 0.6}), Severity.ADVICE, "only 60 %"),
    "load_swings": (Change(swing=220.0), Severity.ADVICE, "between 40 and 1800"),
    "generators_run_small_batches": (
        Change(actor={"requests_running": 160.0}),
        Severity.ADVICE,
        "decodes 160 sequences",
    ),
}

JOB_CASES: dict[str, tuple[dict[str, Any], Severity, str]] = {
    "admission_below_places": (
        {"staleness": {"eta": 0}},
        Severity.WARNING,
        "512 sequences be outstanding, but the generators have 1024",
    ),
    "small_generator_batch": (
        {"actors": {"generator": {"maxRunningRequests": 64}}},
        Severity.ADVICE,
        "at most 64 sequences",
    ),
    "unusual_share": ({"trainers": {"replicas": 2}}, Severity.ADVICE, "20 % of the GPUs generate"),
    "large_planned_lag": (
        {"algorithm": {"groupsPerStep": 4}, "staleness": {"eta": 100}},
        Severity.WARNING,
        "up to about 64 steps old",
    ),
    "no_checkpoints": (
        {"trainers": {"checkpoint": {"everySteps": 0}}},
        Severity.ADVICE,
        "everySteps=0 of 1000 steps",
    ),
    "no_parity_check": (
        {"trainers": {"parity": {"numPrompts": 0}}},
        Severity.ADVICE,
        "are not compared",
    ),
}


def names(findings: list[Named]) -> list[str]:
    return [named.rule for named in findings]


def write_run(folder: Path, change: Change, spec: Job) -> Path:
    folder.mkdir()
    (folder / "job.yaml").write_text(
        yaml.safe_dump(spec.model_dump(mode="json", by_alias=True, exclude_none=True))
    )
    (folder / "metrics.jsonl").write_text(
        "".join(record.to_json() + "\n" for record in run_records(change))
    )
    (folder / "summary.json").write_text(json.dumps({"status": change.status}))
    return folder


def test_every_rule_has_a_case() -> None:
    assert set(RUN_CASES) == set(RUN_RULES)
    assert set(JOB_CASES) == set(JOB_RULES)


def test_healthy_run_and_job_have_no_findings() -> None:
    assert diagnose_run(run_facts(Change())) == []
    assert diagnose_job(JobFacts(job())) == []


@pytest.mark.parametrize("rule", RUN_CASES)
def test_run_rule_fires_alone(rule: str) -> None:
    change, severity, message = RUN_CASES[rule]
    findings = diagnose_run(run_facts(change))
    assert names(findings) == [rule]
    finding = findings[0].finding
    assert finding.severity is severity
    assert message in finding.message
    assert finding.turn
    assert finding.numbers


@pytest.mark.parametrize("rule", JOB_CASES)
def test_job_rule_fires_alone(rule: str) -> None:
    changes, severity, message = JOB_CASES[rule]
    findings = diagnose_job(JobFacts(job(changes)))
    assert names(findings) == [rule]
    finding = findings[0].finding
    assert finding.severity is severity
    assert message in finding.message
    assert finding.turn
    assert finding.numbers


@pytest.mark.parametrize(
    "change",
    [
        Change(late={"ess": 0.81, "clip_fraction": 0.19, "lag_mean": 7.9, "grad_norm": 9.9}),
        Change(late={"success_mean": 0.9, "completion_length_mean": 790.0, "entropy": 0.051}),
        Change(late={"entropy": 0.01, "reward_mean": 0.95}),  # learnt: nothing is left to try
        Change(
            late={
                "packing_fill": 0.81,
                "packing_imbalance": 0.09,
                "pause_seconds": 0.49,
                "publish_seconds": 9.9,
            }
        ),
        Change(step={"wait_seconds": 1.9}),
        Change(preempted=40.0, preprocessor={"engine_kv_usage_ratio": 0.9}),
        Change(step={"wait_seconds": 0.0}),  # the generators are full and so is the trainer
        Change(
            preprocessor={
                "queue_groups{stage=ready}": 95.0,
                "groups_dropped_total{reason=stale}": 100.0,
            }
        ),
        Change(preprocessor={"groups_dropped_total{reason=zero_advantage}": 2000.0}),
        Change(actor={"requests_running": 193.0}, swing=0),
        Change(actor={"rollout_errors_total{reason=timeout}": 50.0}),
        Change(actor_0={"tokens_generated_total": 51_000.0 * 40}, num_steps=1),
        Change(late={"memory_bytes": 16e9}),  # too short a run
        Change(step={"reward_mean": 0.95}),
    ],
)
def test_just_inside_the_limits_nothing_fires(change: Change) -> None:
    assert names(diagnose_run(run_facts(change))) == []


def test_degrees() -> None:
    assert (
        diagnose_run(run_facts(Change(late={"ess": 0.4})))[0].finding.severity is Severity.CRITICAL
    )
    hard = diagnose_run(run_facts(Change(late={"success_mean": 0.001})))[0].finding
    assert (hard.severity, "too hard" in hard.message) == (Severity.CRITICAL, True)
    few = diagnose_run(run_facts(Change(late={"weight_update_failures_total": 1.0})))[0].finding
    assert few.severity is Severity.ADVICE
    dropped = Change(preprocessor={"groups_dropped_total{reason=zero_advantage}": 5000.0})
    assert names(diagnose_run(run_facts(dropped))) == ["groups_without_gradient"]


def test_remedies_speak_of_gpus_only_where_there_are_some() -> None:
    late = {"publish_seconds": 12.0}
    for step, actor in ((WAITS, {}), (NEVER_WAITS, IDLE)):
        for gpus, word in ((0, "where cores are free"), (1, "GPUs at a time")):
            change = Change(
                spec={"actors": {"gpusPerReplica": gpus}}, step=step, late=late, actor=actor
            )
            turns = " ".join(
                turn for named in diagnose_run(run_facts(change)) for turn in named.finding.turn
            )
            assert word in turns
            assert ("GPU" in turns) is (gpus > 0)


def starting(now: float, served_at: float | None = None) -> RunFacts:
    """A run without a step that began at 0 and still runs; its generators have served since
    `served_at`.
    """
    records = [Record("up", "up", 0.0, -1, {"session_started": 1.0})]
    for time in (served_at, now):
        version = -1.0 if served_at is None or time is None else 0.0
        records.append(
            Record("preprocessor", "preprocessor-0", time or now, -1, {"served_version": version})
        )
    return RunFacts(job(), "running", tuple(records), now=now)


@pytest.mark.parametrize(
    ("facts", "severity", "message"),
    [
        (
            starting(45),
            Severity.ADVICE,
            "the generators do not serve yet, for 45 s by now, which may take 3600 s",
        ),
        (starting(700), Severity.WARNING, "for 700 s by now"),
        (starting(3700), Severity.CRITICAL, "which may take 3600 s (actors.startupTimeoutSeconds)"),
        (
            starting(150, 100),
            Severity.ADVICE,
            "first batch is generated and trained, for 50 s by now, which may take 720 s",
        ),
        (starting(900, 100), Severity.CRITICAL, "for 800 s by now"),
    ],
)
def test_a_start_is_as_severe_as_it_is_late(
    facts: RunFacts, severity: Severity, message: str
) -> None:
    (named,) = diagnose_run(facts)
    assert (named.rule, named.finding.severity) == ("no_step_done", severity)
    assert message in named.finding.message


def test_who_does_not_answer_is_told_and_not_what_follows_from_it() -> None:
    change, *_ = RUN_CASES["environment_starves_generators"]
    records = run_records(replace(change, up={"silent_generator-0-0_seconds": 30.0}))
    found = diagnose_run(RunFacts(job(change.spec), "running", tuple(records), now=410.0))
    assert names(found) == ["processes_silent"]
    assert "generator-0-0 for 40 s" in found[0].finding.message  # 30 s at 400, and 10 s since
    later = RunFacts(
        job(change.spec),
        "running",
        (*records, Record("up", "up", 411, -1, {"silent_generator-0-0_seconds": 0.0})),
    )
    assert "processes_silent" not in names(diagnose_run(later))


def test_an_actor_whose_records_have_ceased_while_others_go_on_is_silent() -> None:
    records = [
        record
        for record in run_records(Change())
        if record.instance != "actor-2" or record.time < 350
    ]
    (named,) = diagnose_run(RunFacts(job(), "running", tuple(records)))
    assert named.rule == "processes_silent"
    assert "actor-2 for 60 s" in named.finding.message  # from 340 to 400
    assert "processes_silent" not in names(
        diagnose_run(RunFacts(job(), "finished", tuple(records)))
    )


def test_an_evaluation_that_does_not_end_is_told_with_its_step_and_one_that_may_still_is_not() -> (
    None
):
    evaluating = Change(
        spec=EVALUATED, status="interrupted", evaluator={"evaluation_running_step": 20.0}
    )
    (named,) = diagnose_run(run_facts(evaluating))  # from 10 to 400
    assert (named.rule, named.finding.message) == (
        "evaluations_fail",
        "evaluation: that of step 20 has not ended after 390 s",
    )
    assert "evaluation.timeoutSeconds: higher than 100 where one takes longer" in named.finding.turn
    patient = {**EVALUATED, "evaluation": {**EVALUATED["evaluation"], "timeoutSeconds": 380}}
    assert diagnose_run(run_facts(replace(evaluating, spec=patient))) == []


def test_a_last_step_without_evaluation_is_told_with_what_makes_up_for_it() -> None:
    change = Change(
        spec=EVALUATED,
        evaluator={"evaluation_running_step": -1.0, "evaluations_total{outcome=done}": 1.0},
    )
    (named,) = diagnose_run(run_facts(change))
    assert named.finding.message == "evaluation: step 40, the last one, was not evaluated"
    assert named.finding.turn[-1] == "the same `pipelinerl up` again: it evaluates the last step"
    records = (
        *run_records(change),
        Record("evaluator", "evaluator-0", 401, 40, {"evaluated_step": 40.0}),
    )
    assert diagnose_run(RunFacts(job(change.spec), "finished", records)) == []


def test_of_a_run_that_scales_by_itself_the_actors_that_there_were_count() -> None:
    """One at first and two in the settled half, of at most four: 512 places, and not the file's 256
    nor 1024.
    """

    def with_actors(first: float, then: float) -> list[Record]:
        sizes = [
            Record("up", "up", time, -1, {"actors_ready": count})
            for time, count in ((1.0, first), (195.0, then))
        ]
        records = [
            record
            for record in run_records(Change())
            if record.instance not in ("actor-2", "actor-3")
        ]
        return sorted([*records, *sizes], key=lambda record: record.time)

    facts = RunFacts(job(SCALES), "finished", tuple(with_actors(1, 2)))
    assert (facts.job.num_actors, facts.job.num_places, facts.job.num_generating) == (2, 512, 2)
    assert facts.fill == pytest.approx(460 / 512, rel=1e-3)
    assert names(diagnose_run(facts)) == []


def test_of_a_job_that_scales_by_itself_as_many_actors_as_there_may_be_count() -> None:
    facts = JobFacts(job(SCALES))
    assert (facts.num_places, facts.num_generating) == (1024, 4)
    assert diagnose_job(facts) == []
    (named,) = diagnose_job(JobFacts(job({**SCALES, "staleness": {"eta": 0}})))
    assert (
        "512 sequences be outstanding, but the generators have 1024 places" in named.finding.message
    )


def test_of_a_long_log_the_newest_lines_are_told_and_of_several_logs_the_newest(
    tmp_path: Path,
) -> None:
    def line(second: int, words: str) -> str:
        return (
            f"2026-11-30T09:00:{second:02d}.000Z WARNING actor-0 trajectory given up: "
            f"reason=http_400 {words}\n"
        )

    (tmp_path / "actor-0.log").write_text(
        "".join(line(second, f"number {second}") for second in range(60))
    )
    (tmp_path / "actor-1.log").write_text(line(30, "of another actor"))
    assert given_up_messages(tmp_path) == {"http_400": "number 59"}
    assert given_up_messages(tmp_path, most_bytes=100) == {"http_400": "number 59"}
    (tmp_path / "actor-1.log").write_text(
        line(59, "before") + "2026-11-30T09:01:00.000Z INFO actor-1 continues\n" * 10
    )
    assert given_up_messages(tmp_path, most_bytes=100) == {"http_400": "number 59"}


def test_why_nothing_succeeds_is_told_with_the_words_of_the_actors_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = replace(RUN_CASES["nothing_succeeds"][0], status="failed")
    folder = write_run(tmp_path / "run", change, job())
    (folder / "logs").mkdir()
    line = (
        "2026-11-30T09:00:00.000Z WARNING actor-0 trajectory given up: reason=http_400 HTTP "
        "400: prompt of 90 tokens"
    )
    (folder / "logs" / "actor-0.log").write_text(f"{line}\nanother line\n")
    failure = "actor-0 cannot run: wrong job or task: 64 prompts failed"
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "failure": failure}))
    assert main(["doctor", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"the run failed after 0 steps: {failure}  [run_failed]" in shown
    assert (
        "640 attempts failed: http_400 640 (HTTP 400: prompt of 90 tokens)  [nothing_succeeds]"
        in shown
    )
    assert "    -> model.maxModelLen: at least a prompt and task.sampling.maxTokens\n" in shown
    assert "startupTimeoutSeconds" not in shown
    assert main(["report", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["failure"] == failure


def test_more_sequences_at_once_are_proposed_only_while_the_kv_cache_has_room() -> None:
    for usage, proposed in ((0.4, True), (0.85, False)):
        change = Change(step=WAITS, preprocessor={"engine_kv_usage_ratio": usage})
        finding = diagnose_run(run_facts(change))[0].finding
        assert f"with {100 * usage:.0f} % of the KV cache in use" in finding.message
        assert any("maxRunningRequests" in remedy for remedy in finding.turn) == proposed


def test_remedies_that_are_in_place_are_not_proposed() -> None:
    slow = {"pause_seconds": 1.0}
    inplace = {"weightTransfer": {"mode": "inplace", "kvCache": "recompute"}}
    assert not any(
        "mode" in turn for turn in diagnose_run(run_facts(Change(late=slow)))[0].finding.turn
    )
    assert any(
        "mode" in turn
        for turn in diagnose_run(run_facts(Change(spec=inplace, late=slow)))[0].finding.turn
    )


def test_drops_name_the_remedy_of_the_most_frequent_reason_first() -> None:
    change = Change(
        preprocessor={
            "groups_dropped_total{reason=expired}": 400.0,
            "groups_dropped_total{reason=ring_buffer}": 500.0,
        }
    )
    turn = diagnose_run(run_facts(change))[0].finding.turn
    assert [advice.partition(":")[0] for advice in turn] == [
        "preprocessor.ringBufferGroups",
        "preprocessor.leaseSeconds",
    ]


def test_most_severe_first_and_the_measured_batch_replaces_the_planned_one() -> None:
    change = Change(
        spec={"actors": {"generator": {"maxRunningRequests": 64}}},
        step={"reward_mean": 0.1, "packing_fill": 0.1},
        late={"ess": 0.7},
        actor={"requests_running": 60.0},
    )
    findings = diagnose_run(run_facts(change))
    assert names(findings) == [
        "reward_flat",
        "ess_low",
        "packing_loose",
        "generators_run_small_batches",
    ]
    order = [SEVERITIES.index(named.finding.severity) for named in findings]
    assert order == sorted(order)


# The command.


def test_run_folder_as_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", Change(late={"ess": 0.7}, swing=220.0), job())
    assert main(["doctor", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("WARNING   the effective sample size is 0.70")
    assert "    -> staleness.eta: lower\n" in shown
    assert "ess=0.7 " in shown
    assert shown.endswith("2 findings\n")
    assert main(["doctor", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(found["rule"], found["severity"]) for found in document["findings"]] == [
        ("ess_low", "warning"),
        ("load_swings", "advice"),
    ]
    assert document["findings"][0]["numbers"]["ess"] == pytest.approx(0.7)


def test_running_job_without_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", Change(), job())
    (folder / "summary.json").unlink()
    assert main(["doctor", str(folder)]) == 0
    assert capsys.readouterr().out == "nothing found\n"


def test_job_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(dict(JOB)))
    assert main(["doctor", str(tmp_path / "job.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "missing")]) == 2
    error = capsys.readouterr().err
    assert "missing: does not exist; give a run's folder or a job file, not the name of " in error
    assert main(["doctor", str(tmp_path)]) == 2
    assert "not a run's folder: it has no job.yaml" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("- 1")
    assert main(["doctor", str(tmp_path / "bad.yaml")]) == 2
    folder = write_run(tmp_path / "run", Change(), job())
    (folder / "metrics.jsonl").write_text("nonsense\n")
    assert main(["doctor", str(folder)]) == 2
    assert "line 1 is not a metrics record" in capsys.readouterr().err
