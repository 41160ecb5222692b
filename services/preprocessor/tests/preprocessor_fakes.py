"""In-process fakes: jobs, samples and groups by default values, and a live ledger without a stream
or a store.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipelinerl_common.metrics import Metrics
from pipelinerl_common.settings import Job, parse_job
from pipelinerl_common.types import (
    FinishReason,
    GroupId,
    Sample,
    SampleGroup,
    VersionRun,
)
from pipelinerl_preprocessor.journal import JournalWriter
from pipelinerl_preprocessor.ledger import Ledger
from pipelinerl_preprocessor.live import LiveLedger, PublishGate, RingBuffer
from pipelinerl_preprocessor.metrics import PreprocessorCounters
from pipelinerl_staleness.policy import Policy


def job_document(**sections: dict[str, Any]) -> dict[str, Any]:
    """B=2 groups of 2 trajectories, areal with eta 1. `sections` are merged over the spec's
    sections.
    """
    spec: dict[str, dict[str, Any]] = {
        "model": {"uri": "tiny://arithmetic", "maxModelLen": 64},
        "task": {"path": "tests.tasks:Task", "groupSize": 2, "sampling": {"maxTokens": 32}},
        "algorithm": {"groupsPerStep": 2, "steps": 100},
        "preprocessor": {"leaseSeconds": 60},
        "trainers": {"microBatchTokens": 64},
    }
    for name, section in sections.items():
        spec[name] = {**spec.get(name, {}), **section}
    return {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "test"},
        "spec": spec,
    }


def make_job(**sections: dict[str, Any]) -> Job:
    return parse_job(job_document(**sections), source="test")


def make_sample(
    index: int,
    reward: float,
    *,
    prompt: int = 3,
    sampled: int = 4,
    version: int = 0,
    finish: FinishReason = FinishReason.STOP,
    logprob: float = -0.5,
) -> Sample:
    return Sample(
        index=index,
        token_ids_S=np.arange(100, 100 + prompt + sampled, dtype=np.uint32),
        segment_lengths=(prompt, sampled) if sampled else (prompt,),
        logprobs_T=np.full(sampled, logprob, dtype=np.float32),
        version_runs=(VersionRun(version, sampled),) if sampled else (),
        reward=reward,
        finish_reason=finish,
        metrics={"success": float(reward > 0)},
    )


def make_group(
    group_id: str,
    *,
    prompt_index: int = 0,
    attempt: int = 0,
    samples: Sequence[Sample] | None = None,
    version: int = 0,
    temperature: float = 1.0,
    job: str = "test",
) -> SampleGroup:
    chosen = samples or (make_sample(0, 1.0, version=version), make_sample(1, 0.0, version=version))
    return SampleGroup(
        job, GroupId(group_id), attempt, prompt_index, temperature, tuple(chosen), finished_at=1.0
    )


class UnusedJournal:
    """A journal store that the test never writes to."""

    async def put(self, key: str, value: bytes) -> None: ...
    async def delete(self, key: str) -> None: ...
    async def entries(self) -> dict[str, bytes]:
        return {}


def live_ledger(policy: Policy, now: Callable[[], float] = lambda: 0.0) -> LiveLedger:
    """A restored ledger with version 0 served and no group granted."""
    ledger = Ledger(policy, lease_s=1000, max_attempts=3, now=now)
    live = LiveLedger(
        ledger,
        JournalWriter(UnusedJournal(), ledger),
        RingBuffer(100),
        PublishGate(ledger, 10.0, now),
        PreprocessorCounters(Metrics("preprocessor", "test")),
        now=now,
    )
    ledger.restore("start", 0, None)
    ledger.publish(0)
    return live
