"""The job file's schema. `load_job` reads it; each service is handed the smallest section that suffices."""

from pipelinerl_common.settings.algorithm import AlgorithmSettings, KLSettings, OptimizerSettings, OverlongSettings
from pipelinerl_common.settings.job import API_VERSION, KIND, Job, JobSpec
from pipelinerl_common.settings.load import load_job, parse_job
from pipelinerl_common.settings.model import ModelSettings, SamplingSettings, TaskSettings
from pipelinerl_common.settings.roles import (
    ActorSettings,
    CheckpointSettings,
    GeneratorSettings,
    ParitySettings,
    PreprocessorSettings,
    ReferenceSettings,
    StreamSettings,
    TrainerSettings,
    WeightTransferSettings,
)
from pipelinerl_common.settings.staleness import StalenessSettings

__all__ = [
    "API_VERSION",
    "KIND",
    "ActorSettings",
    "AlgorithmSettings",
    "CheckpointSettings",
    "GeneratorSettings",
    "Job",
    "JobSpec",
    "KLSettings",
    "ModelSettings",
    "OptimizerSettings",
    "OverlongSettings",
    "ParitySettings",
    "PreprocessorSettings",
    "ReferenceSettings",
    "SamplingSettings",
    "StalenessSettings",
    "StreamSettings",
    "TaskSettings",
    "TrainerSettings",
    "WeightTransferSettings",
    "load_job",
    "parse_job",
]
