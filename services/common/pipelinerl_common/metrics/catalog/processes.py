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
        {
            "restarted": (
                "preprocessor",
                "actor",
                "generator",
                "reference",
                "trainer",
                "evaluator",
                "nats-server",
            )
        },
    ),
    gauge(
        "actors_desired",
        "actors",
        (COORDINATOR,),
        "Actors that there should be: those of the spec, or what autoscale chose.",
    ),
    gauge(
        "actors_ready",
        "actors",
        (COORDINATOR,),
        "Actors that run, in `pipelinerl up` with every generator in the weight-transfer group.",
    ),
    gauge(
        "autoscale_ratio",
        "ratio",
        (COORDINATOR,),
        "The system's throughput over what generation alone would reach, when autoscale last "
        "looked.",
    ),
    counter(
        "sink_rows_total",
        "rows",
        (TRAINER,),
        "Rows, one per step, by what a sink did with them: written; full when it was too slow; "
        "failed when it raised an error.",
        {"sink": ("wandb", "tensorboard"), "outcome": ("written", "full", "failed")},
    ),
)
