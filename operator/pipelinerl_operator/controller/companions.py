"""What runs beside each job in the leader."""

from pipelinerl_operator.controller.decision import Wanted
from pipelinerl_operator.controller.status import JobStatus, StreamStatus, TrainingStatus, WeightGroupStatus
from pipelinerl_operator.controller.views import JobView
from pipelinerl_operator.kube import Key


class NoCompanions:
    """For a job without weight transfer: benches and tests of the controller alone."""

    def weight_group(self, key: Key) -> WeightGroupStatus | None:
        return None

    def training(self, key: Key) -> tuple[TrainingStatus | None, StreamStatus | None]:
        return None, None

    def follow(self, job: JobView, wanted: Wanted | None, status: JobStatus, token: str | None) -> None:
        pass

    def forget(self, key: Key) -> None:
        pass
