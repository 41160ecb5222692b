"""The processes themselves."""

from typing import Final

from pipelinerl_common.metrics.metric import COORDINATOR, JOB_ROLES, TRAINER, Metric, counter, gauge

PROCESSES: Final[tuple[Metric, ...]] = (
    gauge("memory_bytes", "bytes", JOB_ROLES, "Resident memory of the process."),
    counter(
        "restarts_total",
        "processes",
        (COORDINATOR,),
        "Processes of the job that were started again, by their role.",
        {"restarted": ("preprocessor", "actor", "generator", "reference", "trainer", "nats-server")},
    ),
    counter(
        "sink_rows_total",
        "rows",
        (TRAINER,),
        "Rows, one per step, by what a sink did with them: written; full when it was too slow; failed when it raised an error.",
        {"sink": ("wandb", "tensorboard"), "outcome": ("written", "full", "failed")},
    ),
)
