"""The judgements on a run: when a number is bad, how bad, what that means and what to do about it.

`pipelinerl doctor` and the report judge the means of a whole run by `limit`. The chart's alerts
judge the last minutes by `alarm`, which is looser where a bad moment costs little. Dashboards take
their colours from both. No limit stands anywhere else.

ESS has two levels. It is the share of a batch that would teach as much on-policy. Below 0.8 more
than a fifth of every batch is lost, which costs time (warning). Below 0.5 most of it is lost and
few tokens decide the step, so the run no longer learns what it should (critical). It is the ESS
before truncation: truncation limits the variance of the step but not its bias.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Severity(StrEnum):
    """The severity of a finding or an alert, in the order in which findings are shown."""

    CRITICAL = "critical"
    """The run does not learn what it should, or loses work: look now."""
    WARNING = "warning"
    """Time, tokens or stability are lost: look today."""
    ADVICE = "advice"
    """Worth a look."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A limit on a metric. Example: `LAG.is_beyond(9.0)` is true, and its severity is a warning."""

    metric: str
    """Name in the catalogue of metrics, without prefix. The value judged may be a share of it."""
    limit: float
    severity: Severity
    meaning: str
    """What a value beyond the limit means, as a clause."""
    remedies: tuple[str, ...] = ()
    """Parameters of the job file to change, and how; the most promising first."""
    alarm: float | None = None
    """The limit of the alert; `limit` when it is None."""
    alarm_severity: Severity | None = None
    """The severity beyond `alarm`; `severity` when it is None."""
    is_low: bool = False
    """Whether values below the limits are bad, not those above."""

    @property
    def alarm_limit(self) -> float:
        return self.limit if self.alarm is None else self.alarm

    def is_beyond(self, value: float) -> bool:
        """Whether `value` is worth a finding; NaN is not."""
        return value < self.limit if self.is_low else value > self.limit

    def severity_of(self, value: float) -> Severity:
        """The severity of a value that is beyond the limit."""
        alarms = value < self.alarm_limit if self.is_low else value > self.alarm_limit
        return (self.alarm_severity or self.severity) if alarms else self.severity


CRITICAL, WARNING, ADVICE = Severity
FRESHER: Final = (
    "staleness.eta: lower",
    "algorithm.groupsPerStep: higher",
    "actors.replicas: fewer",
)

# Learning.
SOLVED_REWARD: Final = 0.9
"""A reward from which on a run is not expected to improve."""
NO_STEP = Judgement(
    "last_step_timestamp_seconds", 3600, CRITICAL, "samples do not arrive, or the trainer hangs"
)
REWARD_FLAT = Judgement(
    "reward_mean",
    0.02,
    CRITICAL,
    "the run does not learn",
    (
        "algorithm.optimizer.learningRate: higher, or lower if the reward fell",
        "task.args: prompts of which some succeed",
        "staleness.eta: lower",
    ),
    is_low=True,
)
"""Judges the gain in reward from the first steps to the last."""
REWARD_COLLAPSED = Judgement(
    "reward_mean",
    0.5,
    CRITICAL,
    "the policy has lost what it had learnt",
    ("algorithm.optimizer.learningRate: lower", "staleness.eta: lower"),
)
"""Judges the loss against the best reward, as a share."""
STEPS_SKIPPED = Judgement(
    "skipped_steps_total",
    0,
    CRITICAL,
    "loss or gradient was not finite",
    (
        "algorithm.optimizer.learningRate: lower",
        "algorithm.truncation: lower",
        "model.dtype: bfloat16 rather than float16",
    ),
    alarm=3,
)
CHECKPOINTS_FAIL = Judgement(
    "checkpoint_failures_total",
    0,
    CRITICAL,
    "a crash would lose what came after the last good one",
    ("the output's file system: space and permissions", "trainers.checkpoint.keep: lower"),
)
ESS = Judgement(
    "ess",
    0.8,
    WARNING,
    "importance weights differ so much that few tokens decide the step",
    (*FRESHER, "algorithm.optimizer.learningRate: lower"),
    alarm=0.5,
    alarm_severity=CRITICAL,
    is_low=True,
)
CLIPPED = Judgement("clip_fraction", 0.2, WARNING, "bounds replace the gradient of many tokens")
GRADIENT_NORM = Judgement(
    "grad_norm",
    10,
    ADVICE,
    "every step is scaled down",
    (
        "algorithm.optimizer.maxGradNorm: higher",
        "algorithm.groupsPerStep: higher",
        "algorithm.optimizer.learningRate: lower",
    ),
)
"""Judges the norm over maxGradNorm."""
ENTROPY_COLLAPSED = Judgement(
    "entropy",
    0.1,
    WARNING,
    "the policy has stopped exploring",
    (
        "algorithm.entropyCoefficient: above 0",
        "algorithm.optimizer.learningRate: lower",
        "algorithm.clipHigh: higher",
    ),
    is_low=True,
)
"""Judges the last entropy over the first."""
NO_ADVANTAGE = Judgement(
    "groups_dropped_total",
    0.5,
    WARNING,
    "groups with equal rewards teach nothing",
    alarm=0.9,
    alarm_severity=CRITICAL,
)
"""Judges the share of groups without a gradient; critical where the prompts are too hard."""
COMPLETIONS_LONG = Judgement(
    "completion_length_mean",
    0.8,
    WARNING,
    "many are cut off before their answer",
    (
        "task.sampling.maxTokens: higher, with model.maxModelLen",
        "algorithm.overlong.penaltyBufferTokens: above 0",
        "algorithm.overlong.completions: mask",
    ),
)
"""Judges the mean length over maxTokens."""
COMPLETIONS_CUT_OFF = Judgement(
    "completion_overflow_ratio",
    0.1,
    WARNING,
    COMPLETIONS_LONG.meaning,
    COMPLETIONS_LONG.remedies,
    alarm=0.3,
)

# Staleness.
LAG = Judgement("lag_mean", 8, WARNING, "tokens are trained long after they were sampled", FRESHER)
LAG_RISING = Judgement("lag_mean", 1.5, WARNING, "training falls behind generation", FRESHER)
"""Judges the lag over that of half an hour before."""
PLANNED_LAG = Judgement(
    "lag_mean",
    32,
    WARNING,
    "no study covers a longer lag",
    FRESHER,
)
"""Judges the largest lag that a job may have; 32 is the largest of the paper's section 5.1."""
QUEUE_DEPTH = Judgement(
    "queue_groups",
    1.5,
    WARNING,
    "each batch that waits adds a step of lag",
    ("staleness.eta: lower", "actors.replicas: fewer", "trainers.replicas: more"),
    alarm=4,
)
"""Judges batches of finished groups that wait for the trainer."""
DROPS = Judgement(
    "groups_dropped_total", 0.05, WARNING, "these groups were generated for nothing", alarm=0.5
)
"""Judges the share of groups that end untrained."""

# Throughput.
TRAINER_STARVED = Judgement(
    "trainer_phase_seconds_total", 0.2, WARNING, "generation is slower than training", alarm=0.6
)
"""Judges the share of the trainer's time spent waiting."""
TRAINER_BUSY = Judgement(
    "trainer_phase_seconds_total", 0.1, WARNING, "training is slower than generation", is_low=True
)
GENERATORS_IDLE = Judgement(
    "requests_running", 0.6, WARNING, "places of the generators are empty", is_low=True
)
"""Judges the share of the places that are taken."""
SMALL_BATCH = Judgement(
    "requests_running", 192, ADVICE, "decoding waits for memory, not for arithmetic", is_low=True
)
"""Judges sequences that a generating GPU decodes concurrently (H)."""
LOAD_SWINGS = Judgement(
    "requests_running",
    0.5,
    ADVICE,
    "generators are filled in bursts",
    ("staleness.eta: higher", "staleness.policy: one that admits group by group, such as slack"),
)
"""Judges the standard deviation over the mean."""
ACTORS_UNEVEN = Judgement(
    "tokens_generated_total", 0.2, WARNING, "one actor is slower than the others"
)
"""Judges the distance below the mean; users report 15 to 20 % as usual."""
KV_CACHE_FULL = Judgement(
    "kv_cache_usage_ratio", 0.92, WARNING, "sequences preempt one another", alarm=0.97
)
KV_CACHE_TIGHT = Judgement(
    "kv_cache_usage_ratio", 0.7, ADVICE, "more sequences would soon preempt one another"
)
PREEMPTIONS = Judgement(
    "preemptions_total", 0.1, WARNING, "each time all of the sequence is computed again"
)
"""Judges preemptions per trajectory; rare ones cost little."""
ROLLOUT_ERRORS = Judgement("rollout_errors_total", 0.01, WARNING, "trajectories are retried")
"""Judges errors per trajectory."""
GROUPS_FAIL = Judgement("groups_failed_total", 0.2, WARNING, "their tokens are lost")
"""Judges the share of groups."""
VERIFICATION_SECONDS = Judgement(
    "verification_seconds", 10, WARNING, "groups wait while their places are empty"
)
STREAM_FULL = Judgement("stream_bytes", 0.8, CRITICAL, "when it is full, actors wait")
"""Judges the share of the stream's bytes in use."""
PACKING_FILL = Judgement(
    "packing_fill",
    0.8,
    ADVICE,
    "slots of the micro-batches hold no token",
    (
        "trainers.microBatchTokens: a larger multiple of the usual length",
        "algorithm.groupsPerStep: higher",
    ),
    is_low=True,
)
PACKING_IMBALANCE = Judgement(
    "packing_imbalance",
    0.1,
    WARNING,
    "the other ranks wait for the fullest in every step",
    (
        "algorithm.groupsPerStep: higher",
        "trainers.microBatchTokens: lower",
        "trainers.replicas: fewer",
    ),
    alarm=0.3,
)
STABLE_SHARE: Final = (0.30, 0.35)
"""The share of the GPUs that generates in runs that are stable."""

# Weights.
UPDATES_FAIL = Judgement(
    "weight_update_failures_total",
    0.05,
    WARNING,
    "old weights were served until the next",
    ("weightTransfer.syncTimeoutSeconds: higher", "logs/ of the generators"),
)
"""Judges the share of updates."""
UPDATES_KEEP_FAILING = Judgement(
    "weight_update_failures_total", 3, CRITICAL, "generators keep their old weights"
)
"""Judges failures within 15 minutes."""
UPDATE_SECONDS = Judgement("publish_seconds", 60, WARNING, "the lag grows by the time of an update")
UPDATE_STEPS = Judgement("publish_seconds", 1, WARNING, "versions are skipped and the lag grows")
"""Judges the time of an update over that of a step."""
PAUSE_SECONDS = Judgement("pause_seconds", 5, WARNING, "no token is sampled meanwhile")
PAUSE_SHARE = Judgement("weight_pause_seconds", 0.05, WARNING, PAUSE_SECONDS.meaning, alarm=0.2)
"""Judges the share of the time in which generators do not decode."""
WEIGHTS_BEHIND = Judgement(
    "served_version", 8, CRITICAL, "every token is that much older when it is trained"
)
"""Judges steps between the trainer's weights and the generators'."""
GENERATORS_ABSENT = Judgement("generators_absent", 0.1, WARNING, "they sample nothing")
"""Judges the share of the generators."""

# Operation.
RESTARTS = Judgement(
    "restarts_total",
    0,
    WARNING,
    "each restart repeats work that was not saved",
    (
        "logs/ of these processes",
        "actors.generator.kvCacheBytes, trainers.microBatchTokens: lower if memory ran out",
    ),
    alarm=3,
)
MEMORY_GROWS = Judgement("memory_bytes", 1.5, WARNING, "a process may run out of memory")
"""Judges the memory in a run's last quarter over that in its second."""
OPERATOR_QUEUE = Judgement(
    "operator_queue_oldest_seconds", 60, WARNING, "the operator does not keep up with its jobs"
)
WATCH_SILENCE = Judgement(
    "operator_watch_silence_seconds",
    900,
    WARNING,
    "the operator receives no changes of its objects",
)


RECONCILE_SECONDS = Judgement(
    "operator_reconcile_seconds", 5, WARNING, "changes of a job take effect late"
)
WATCH_RESTARTS = Judgement(
    "operator_watch_restarts_total", 0.1, WARNING, "the connection to the API server fails"
)
"""Judges restarts per second."""
OPERATOR_MEMORY = Judgement(
    "operator_memory_bytes", 450e6, WARNING, "the operator is near its memory limit in the chart"
)
