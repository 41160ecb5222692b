"""The trainer's, from rank 0 for all ranks. Gauges are of the newest step."""

from typing import Final

from pipelinerl_common.metrics.metric import TRAINER, Kind, Metric, counter, gauge

MAX_LAG_BUCKET: Final = 15

PHASES: Final = ("wait", "train", "commit", "publish", "checkpoint")
"""Where the training thread's time goes: waiting for the batch; forward, backward and optimizer;
telling the preprocessor; handing the weights over; writing a checkpoint.
"""

_T: Final = (TRAINER,)

LEARNING: Final[tuple[Metric, ...]] = (
    gauge(
        "policy_version",
        "steps",
        _T,
        "Optimizer steps done, which is the version of the newest weights.",
    ),
    counter("optimizer_steps_total", "steps", _T, "Optimizer steps done by this process."),
    gauge(
        "last_step_timestamp_seconds",
        "seconds",
        _T,
        "When the newest step ended, in seconds since 1970.",
    ),
    counter(
        "skipped_steps_total",
        "steps",
        _T,
        "Steps that changed nothing because the gradient was not finite.",
    ),
    gauge(
        "non_finite_micro_batches", "micro-batches", _T, "Micro-batches whose loss was not finite."
    ),
    counter(
        "checkpoint_failures_total", "checkpoints", _T, "Checkpoints that could not be written."
    ),
    Metric(
        "lag_steps",
        Kind.HISTOGRAM,
        "steps",
        _T,
        "Trained tokens by lag: the version that trained them minus the version that sampled them.",
        buckets=tuple(float(lag) for lag in range(MAX_LAG_BUCKET + 1)),
        records_buckets=True,
    ),
    gauge("lag_mean", "steps", _T, "Mean lag of the batch's tokens."),
    gauge("lag_max", "steps", _T, "Largest lag of a token in the batch."),
    gauge(
        "ess",
        "ratio",
        _T,
        "Effective sample size of the batch's importance weights before truncation; 1 is on-policy.",
    ),
    gauge("ess_truncated", "ratio", _T, "The same after truncation or clipping."),
    gauge(
        "reward_mean", "reward", _T, "Mean reward of the batch's trajectories, as the task gave it."
    ),
    gauge(
        "success_mean",
        "ratio",
        _T,
        "Mean of the task's success metric; missing where the task has none.",
    ),
    gauge(
        "completion_length_mean",
        "tokens",
        _T,
        "Mean number of sampled tokens of the batch's trajectories.",
    ),
    gauge(
        "completion_overflow_ratio",
        "ratio",
        _T,
        "Share of the batch's trajectories that were cut off at maxTokens.",
    ),
    gauge("num_sequences", "samples", _T, "Trajectories in the batch."),
    gauge("num_trained_tokens", "tokens", _T, "Tokens with a loss in the batch."),
    counter("samples_trained_total", "samples", _T, "Trajectories trained by this process."),
    counter("tokens_trained_total", "tokens", _T, "Tokens trained by this process."),
    gauge("loss", "loss", _T, "The step's loss."),
    gauge(
        "grad_norm",
        "norm",
        _T,
        "Norm of the gradient before clipping; missing for a step that was skipped.",
    ),
    gauge("entropy", "nats", _T, "Mean entropy of the policy over the batch's tokens."),
    gauge("kl_ref", "nats", _T, "Mean KL estimate to the reference model; missing without one."),
    gauge(
        "kl_behavior",
        "nats",
        _T,
        "Mean KL estimate from the policies that sampled the tokens to the one that is trained.",
    ),
    gauge(
        "ratio_mean",
        "ratio",
        _T,
        "Mean importance weight of the batch's tokens before any bound; near 1 when all is well.",
    ),
    gauge("ratio_max", "ratio", _T, "Largest importance weight of a token before any bound."),
    gauge(
        "clip_fraction",
        "ratio",
        _T,
        "Share of the tokens whose weight was clipped, truncated or masked.",
    ),
    gauge(
        "value_error",
        "reward",
        _T,
        "Half the mean squared error of the value head; missing without one.",
    ),
    gauge("learning_rate", "rate", _T, "The step's learning rate."),
    gauge("packing_fill", "ratio", _T, "Share of the micro-batches' slots that hold a token."),
    gauge("packing_imbalance", "ratio", _T, "(most - fewest) / most tokens of a rank."),
    gauge("step_seconds", "seconds", _T, "Duration of the step, all phases."),
    gauge("wait_seconds", "seconds", _T, "Of it, waiting for the batch."),
    gauge("train_seconds", "seconds", _T, "Of it, forward, backward and optimizer."),
    counter(
        "trainer_phase_seconds_total",
        "seconds",
        _T,
        "Time of the training thread by what it did.",
        {"phase": PHASES},
    ),
)
