"""`pipelinerl doctor gpu`: facts and a real exchange over gloo on this machine, and through a
kubectl that starts the same processes here.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fakes import Change, job, run_records

from pipelinerl_cli.__main__ import main
from pipelinerl_cli.doctor.gpu import GpuReport, judge_facts, judge_transports
from pipelinerl_cli.doctor.rules import diagnose_run
from pipelinerl_common.judgements import Severity
from pipelinerl_common.runs.facts import RunFacts
from pipelinerl_weights.gpu_check import transports
from pipelinerl_weights.gpu_seats import Seat

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")

KUBECTL = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
state = json.load(open({state!r}))
expected = ["--namespace=lab", "--context=far"]
if arguments[:2] == ["get", "pods"]:
    assert arguments[2:] == ["--selector=pipelinerl.dev/job=sums", "--output=json", *expected]
    print(json.dumps({{"items": state["pods"]}}))
    sys.exit(0)
verb, pod, container, *rest = arguments
assert verb == "exec" and container.startswith("--container=") and rest[:2] == expected, arguments
assert rest[2] == "--", arguments
if pod in state["broken"] and "member" in rest:
    sys.exit("error: unable to upgrade connection: pod does not exist")
os.environ["PRL_POD_IP"] = "127.0.0.1"
os.execv({python!r}, [{python!r}, *rest[4:]])
"""
"""Takes the command lines that kubectl takes, and starts what exec asks for on this machine."""


def pod(name: str, role: str, *containers: str, phase: str = "Running") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"pipelinerl.dev/role": role}},
        "spec": {"containers": [{"name": each} for each in containers]},
        "status": {"phase": phase},
    }


def install_kubectl(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pods: list[dict[str, Any]], broken: str = ""
) -> None:
    state = folder / "state.json"
    state.write_text(json.dumps({"pods": pods, "broken": [broken]}))
    script = folder / "kubectl"
    script.write_text(KUBECTL.format(python=sys.executable, state=str(state)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


JOB_FLAGS = ["doctor", "gpu", "sums", "-n", "lab", "--context", "far", "--megabytes", "1"]
PODS = [
    pod("sums-actor-0", "actor", "rollout", "generator-0"),
    pod("sums-actor-1", "actor", "rollout", "generator-0", phase="Pending"),
    pod("sums-preprocessor-0", "preprocessor", "preprocessor"),
    pod("sums-trainer-0", "trainer", "trainer"),
]


@without_gpu
def test_a_machine_without_gpu_is_named_with_the_reason_of_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "gpu", "--local"]) == 1
    shown = capsys.readouterr().out
    assert "this machine: no GPU can be used: " in shown
    assert "members over" not in shown
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    assert str(raised.value).partition("\n")[0] in shown


def test_two_processes_exchange_over_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--local", "--backend", "gloo", "--megabytes", "1", "--json"]
    assert main(["doctor", "gpu", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in found["members"]] == [0, 1]
    for each in found["members"]:
        assert each["num_bytes"] == 1 << 20
        assert each["transport"] == "gloo on 127.0.0.1"
        for key in ("connect_seconds", "all_reduce_seconds", "broadcast_seconds"):
            assert 0 < each[key] < 30
    assert found["places"][0]["torch"] == torch.__version__


def test_the_pods_of_a_job_exchange_and_the_trainer_is_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_kubectl(tmp_path, monkeypatch, PODS)
    assert main([*JOB_FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["sums-trainer-0/trainer", "sums-actor-0/generator-0"]
    assert found["backend"] == "gloo"
    assert [each["place"] for each in found["members"]] == names
    assert [each["name"] for each in found["places"]] == names
    assert "pod sums-actor-1 is Pending" in found["findings"][0]["message"]
    assert main(JOB_FLAGS) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert "2 members over gloo" in shown
    assert "GB/s" in shown


def test_a_pod_that_cannot_take_part_is_named_within_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_kubectl(tmp_path, monkeypatch, PODS, broken="sums-actor-0")
    began = time.monotonic()
    assert main([*JOB_FLAGS, "--timeout", "8", "--json"]) == 1
    assert time.monotonic() - began < 60
    found = json.loads(capsys.readouterr().out)
    failed = [each["message"] for each in found["findings"] if each["rule"] == "group_failed"]
    assert "member 0: members 1 did not come to joined in time" in failed[0]
    assert failed[1].startswith("sums-actor-0/generator-0, member 1: it ended with status 1")
    assert "unable to upgrade connection" in failed[1]
    assert found["members"] == []


@pytest.mark.parametrize(
    "flags",
    [["gpu"], ["gpu", "sums", "--local"], ["job.yaml", "--local"], ["job.yaml", "sums"]],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *flags]) == 2
    assert "gpu" in capsys.readouterr().err


GOOD = {
    "host": "a",
    "python": "3.12.3",
    "torch": "2.13.0",
    "cuda": "13.0",
    "cuda_fault": None,
    "device_fault": None,
    "driver": "580.65.06",
    "nccl": "2.29.7",
    "devices": ["NVIDIA H100 80GB HBM3, 85 GB"] * 8,
    "verbs": True,
    "rdma": ["mlx5_0"],
}


@pytest.mark.parametrize(
    ("change", "rule", "severity"),
    [
        ({}, "", None),
        ({"driver": "570.86.15"}, "driver_too_old", Severity.CRITICAL),
        ({"driver": "570.86.15", "cuda": "12.8"}, "", None),
        ({"nccl": "2.28.3"}, "nccl_versions_differ", Severity.CRITICAL),
        ({"torch": "2.12.0"}, "torch_versions_differ", Severity.WARNING),
        ({"rdma": []}, "transports_differ", Severity.CRITICAL),
        ({"device_fault": "device 0: GPU is lost"}, "device_lost", Severity.CRITICAL),
        ({"cuda_fault": "no device is visible"}, "no_cuda", Severity.CRITICAL),
    ],
)
def test_what_keeps_two_places_from_working_together_is_found(
    change: dict[str, Any], rule: str, severity: Severity | None
) -> None:
    seats = [Seat("t-0/trainer", (), True, GOOD), Seat("a-0/generator-0", (), True, GOOD | change)]
    report = GpuReport("nccl", seats)
    judge_facts(report)
    assert [named.rule for named in report.findings] == ([rule] if rule else [])
    for named in report.findings:
        assert named.finding.severity is severity
        assert "a-0/generator-0" in named.finding.message


def test_devices_without_their_library_are_a_finding_at_every_such_place() -> None:
    seats = [Seat(name, (), True, GOOD | {"verbs": False}) for name in ("t-0", "a-0")]
    report = GpuReport("nccl", seats)
    judge_facts(report)
    assert [named.rule for named in report.findings] == ["no_verbs", "no_verbs"]
    assert "libibverbs" in report.findings[0].finding.message


NCCL_LOG = """\
node-a:71:71 [0] NCCL INFO Using network {network}
node-a:71:90 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [receive] via NET/{network}/0/GDRDMA
node-a:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


def test_members_that_chose_different_networks_are_a_finding() -> None:
    report = GpuReport("nccl", [])
    report.members = [
        {"place": f"p-{rank}", "rank": rank, "transport": transports(NCCL_LOG.format(network=name))}
        for rank, name in enumerate(("IB", "IB", "Socket"))
    ]
    assert report.members[0]["transport"] == "NET/IB, P2P"
    judge_transports(report)
    assert [named.rule for named in report.findings] == ["transports_differ"]
    message = report.findings[0].finding.message
    assert "NET/IB: p-0, member 0, p-1, member 1; NET/Socket: p-2, member 2" in message


def test_the_network_is_known_before_a_channel_uses_it() -> None:
    assert transports("node-a:71:71 [0] NCCL INFO Using network Socket\n") == "NET/Socket"
    assert transports("") == ""


def test_the_gpu_that_a_generator_of_a_run_has_lost_is_named(tmp_path: Path) -> None:
    (tmp_path / "generator-0-0.log").write_text(
        "2026-11-30T09:00:00.000Z ERROR generator-0-0 the GPU does not answer: device 0: GPU is "
        "lost\nanother line\n"
    )
    (tmp_path / "generator-1-0.log").write_text(
        "2026-11-30T09:00:00.000Z ERROR generator-1-0 the GPU does not answer: no answer\n"
        "2026-11-30T09:00:30.000Z INFO generator-1-0 the GPU answers again\n"
    )
    facts = RunFacts(job(), "running", tuple(run_records(Change())), logs=tmp_path)
    found = {named.rule: named.finding for named in diagnose_run(facts)}
    assert list(found) == ["device_lost"]
    assert found["device_lost"].severity is Severity.CRITICAL
    assert "1 process reported a GPU" in found["device_lost"].message
    assert "generator-0-0 (device 0: GPU is lost)" in found["device_lost"].message
