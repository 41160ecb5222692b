"""A fresh live run against its own simulation: the same decisions when replayed, and as long, busy
and full as simulated.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl_actor.models.tiny import make_tiny_model
from up_run import Run

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(600)]

JOB = """
apiVersion: pipelinerl.dev/v1alpha1
kind: PipelineRLJob
metadata: {name: recorded}
spec:
  model: {uri: MODEL, dtype: float32, maxModelLen: 512}
  task:
    path: pipelinerl_actor.tasks.arithmetic:Arithmetic
    args: {digits: 1}
    groupSize: 4
    sampling: {temperature: 1.0, maxTokens: 400} # 1 token in 100 is an end token
  algorithm:
    steps: 24
    groupsPerStep: 8
    loss: reinforce
    baseline: leave_one_out
    dropZeroAdvantage: false
    optimizer: {learningRate: 1.0e-6}
  staleness: {policy: areal, eta: 2}
  actors:
    replicas: 1
    generator: {engine: vllm, maxRunningRequests: 32, kvCacheBytes: 16777216}
    startupTimeoutSeconds: 240
    drainSeconds: 5
  trainers: {zeroStage: 1, microBatchTokens: 1024}
  weightTransfer: {backend: gloo, mode: staged, kvCache: keep, bucketBytes: 4194304}
"""


def test_a_live_run_is_what_its_simulation_says(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Other work on the machine changes the costs during the run, so this one is held to 30
    %, beyond which the model would be wrong; a recording in services/planner/tests is held to 5 %.
    """
    make_tiny_model(tmp_path / "weights")
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(yaml.safe_load(JOB.replace("MODEL", str(tmp_path / "weights")))))
    run = new_run("recorded", job=job).start()
    assert run.wait(540) == 0, run.terminal[-4000:]

    def cli(*words: str) -> str:
        command = [sys.executable, "-m", "pipelinerl_cli", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    assert "decisions" in cli("replay", str(run.output))
    document: dict[str, Any] = json.loads(cli("simulate", "--from-run", str(run.output), "--json"))
    assert document["num_steps"] == 24
    assert max(abs(one["difference"]) for one in document["comparisons"]) <= 0.30, document[
        "comparisons"
    ]
