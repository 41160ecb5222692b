"""What follows from a job file alone."""

from dataclasses import dataclass
from math import ceil

from pipelinerl_common.settings import Job, JobSpec
from pipelinerl_staleness.policy import Policy
from pipelinerl_staleness.registry import make_policy


@dataclass(frozen=True, slots=True)
class JobFacts:
    job: Job
    actors_in_use: float | None = None
    """On average, of a run that scales by itself."""

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def policy(self) -> Policy:
        """A fresh policy of the job's kind."""
        return make_policy(self.spec.staleness.parse(), self.spec.algorithm.groups_per_step)

    @property
    def num_actors(self) -> float:
        """Of a run that scales by itself as many as there were, of such a job as many as there may
        be.
        """
        return self.spec.most_actors if self.actors_in_use is None else self.actors_in_use

    @property
    def num_places(self) -> int:
        """Sequences that all generators can decode at once."""
        actors = self.spec.actors
        return round(
            self.num_actors * actors.generators_per_replica * actors.generator.max_running_requests
        )

    @property
    def num_generating(self) -> float:
        """GPUs that generate; 0 on CPUs."""
        return self.num_actors * self.spec.actors.gpus_per_replica

    @property
    def num_training(self) -> int:
        return self.spec.trainers.replicas * self.spec.trainers.processes_per_node

    @property
    def batch_size(self) -> int:
        """Sequences of one optimizer step."""
        return self.spec.algorithm.groups_per_step * self.spec.task.group_size

    @property
    def max_admitted(self) -> int:
        """Sequences that the staleness policy lets be generated or wait at once."""
        return self.policy.max_outstanding() * self.spec.task.group_size

    @property
    def planned_lag(self) -> int:
        """g_max = ceil(H * I * L / (mean * B)) of the paper's appendix A.3 with lengths uniform up
        to maxTokens (L / mean = 2), but no more than the batches that the policy lets be
        outstanding.
        """
        uncapped = ceil(2 * self.num_places / self.batch_size)
        return min(
            uncapped, ceil(self.policy.max_outstanding() / self.spec.algorithm.groups_per_step)
        )
