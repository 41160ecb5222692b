"""The job file's schema. `load_job` reads it; each service is handed the smallest section that
suffices.
"""

from pipelinerl_common.settings.algorithm import (
    AlgorithmSettings,
    KLSettings,
    OptimizerSettings,
    OverlongSettings,
)
from pipelinerl_common.settings.base import cluster_only_paths, service_view
from pipelinerl_common.settings.evaluation import EvaluationSetSettings, EvaluationSettings
from pipelinerl_common.settings.job import API_VERSION, KIND, Job, JobSpec, StalenessSettings
from pipelinerl_common.settings.kubernetes import (
    EnvironmentVariable,
    FailurePolicySettings,
    FailureRule,
    GangSettings,
    ModelCacheSettings,
    NetworkSettings,
    RestartSettings,
    SchedulingSettings,
)
from pipelinerl_common.settings.load import describe_fault, load_job, parse_job, parse_newer_job
from pipelinerl_common.settings.model import (
    AdapterSettings,
    ModelSettings,
    SamplingSettings,
    TaskSettings,
)
from pipelinerl_common.settings.roles import (
    ActorSettings,
    AutoscaleSettings,
    CheckpointSettings,
    GeneratorSettings,
    ParitySettings,
    PreprocessorSettings,
    ReferenceSettings,
    StreamSettings,
    TrainerSettings,
    WeightTransferSettings,
)
from pipelinerl_common.settings.telemetry import (
    SinkSettings,
    TelemetrySettings,
    TensorBoardSettings,
    TracingSettings,
    WandbSettings,
)

__all__ = [
    "API_VERSION",
    "KIND",
    "ActorSettings",
    "AdapterSettings",
    "AlgorithmSettings",
    "AutoscaleSettings",
    "CheckpointSettings",
    "EnvironmentVariable",
    "EvaluationSetSettings",
    "EvaluationSettings",
    "FailurePolicySettings",
    "FailureRule",
    "GangSettings",
    "GeneratorSettings",
    "Job",
    "JobSpec",
    "KLSettings",
    "ModelCacheSettings",
    "ModelSettings",
    "NetworkSettings",
    "OptimizerSettings",
    "OverlongSettings",
    "ParitySettings",
    "PreprocessorSettings",
    "ReferenceSettings",
    "RestartSettings",
    "SamplingSettings",
    "SchedulingSettings",
    "SinkSettings",
    "StalenessSettings",
    "StreamSettings",
    "TaskSettings",
    "TelemetrySettings",
    "TensorBoardSettings",
    "TracingSettings",
    "TrainerSettings",
    "WandbSettings",
    "WeightTransferSettings",
    "cluster_only_paths",
    "describe_fault",
    "load_job",
    "parse_job",
    "parse_newer_job",
    "service_view",
]
