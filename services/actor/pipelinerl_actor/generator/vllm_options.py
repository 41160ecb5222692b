"""The process environment and the arguments that vLLM is started with. Importing this module does
not import vLLM, which reads the environment on import.
"""

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from pipelinerl_actor.generator.engine import EngineOptions
from pipelinerl_common.errors import SettingsError

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are folders by now
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",  # no third-party plugin changes what is sampled
    # scoring a full-length trajectory needs room for one more token, see vllm_engine.py
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # the scores' temperature hooks into the first one, see vllm_worker.py
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment(
    log_level: str, *, on_cpu: bool, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Sets what vLLM reads. `on_cpu` leaves cores to the job's other processes instead of binding
    to them.
    """
    environ.update(_ENVIRONMENT)
    level = "DEBUG" if log_level == "debug" else "ERROR"
    environ["VLLM_LOGGING_LEVEL"] = level
    logging.getLogger("vllm").setLevel(level)
    if on_cpu:
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # A single worker then runs in the engine core's process.
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # The model runs eagerly there; to compile vLLM's few compiled helpers takes a C++ compiler,
        # which an image may lack.
        environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))


STAGING = "pipelinerl_staging"
"""Key of vLLM's `additional_config`: whether to reserve memory for a second copy of the weights."""

ADAPTER_SCALE = "pipelinerl_adapter_scale"
"""Another key: EngineOptions.adapter_scale."""

_WORKER = "pipelinerl_actor.generator.vllm_worker.GeneratorWorker"
_FIXED = {
    "additional_config",
    "enable_prefix_caching",
    "logprobs_mode",
    "max_num_seqs",
    "model",
    "tensor_parallel_size",
    "worker_cls",
}
_WHOLE = ("data_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""Ways to split an engine in which updates of the weights are not known to reach every worker."""
_CPU_STEP_TOKENS = 2048
"""Least number of tokens of one engine step; a prompt is never split over two."""


def engine_args(options: EngineOptions) -> "AsyncEngineArgs":
    """Our arguments, overridden by the user's `engineArgs`. Raises SettingsError for those that
    vLLM does not know or that cannot be set.
    """
    from vllm import AsyncEngineArgs

    generator = options.settings
    arguments: dict[str, Any] = {
        "model": str(options.model),
        "dtype": options.dtype,
        # One more than a trajectory: to score a full-length one, vLLM samples a token behind it.
        "max_model_len": options.max_model_len + 1,
        "tensor_parallel_size": generator.tensor_parallel_size,
        "max_num_seqs": generator.max_running_requests,
        "enable_prefix_caching": generator.prefix_caching,
        "kv_cache_memory_bytes": generator.kv_cache_bytes,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": options.on_cpu,
        "worker_cls": _WORKER,
        "additional_config": {STAGING: options.can_stage, ADAPTER_SCALE: options.adapter_scale},
        "disable_log_stats": True,
        "seed": 0,
        "generation_config": "vllm",
        "trust_remote_code": False,
    }
    if options.on_cpu:
        # A prompt read in parts rewinds its request's seeded generator, which torch cannot do on a
        # CPU: the engine would die.
        step_tokens = max(_CPU_STEP_TOKENS, options.max_model_len + 1)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": step_tokens}
    unknown = sorted(set(generator.engine_args) - set(AsyncEngineArgs.__dataclass_fields__))
    if unknown:
        raise _fault(f"vLLM has no argument {', '.join(unknown)}; see its EngineArgs for the names")
    fixed = sorted(set(generator.engine_args) & _FIXED)
    if fixed:
        raise _fault(f"{', '.join(fixed)} cannot be set here; use the generator's own fields")
    split = [name for name in _WHOLE if generator.engine_args.get(name, 1) != 1]
    if split:
        raise _fault(
            f"{split[0]}={generator.engine_args[split[0]]} is not supported: "
            "weight updates reach the workers of tensorParallelSize; set that, or more generators"
        )
    if options.on_cpu and generator.engine_args.get("enable_expert_parallel"):
        raise _fault(
            "enable_expert_parallel=true crashes on a CPU, where vLLM's "
            "kernel expects all experts in every worker: leave it out"
        )
    return AsyncEngineArgs(
        **{**arguments, **generator.engine_args, "hf_overrides": _overrides(options)}
    )


def _overrides(options: EngineOptions) -> dict[str, Any]:
    """The user's `hf_overrides`, and the head's dtype, which vLLM reads from the model's
    configuration.
    """
    given = options.settings.engine_args.get("hf_overrides") or {}
    if not isinstance(given, dict):
        raise _fault(f"hf_overrides={given!r} must be a mapping")
    if "head_dtype" in given:
        raise _fault("hf_overrides.head_dtype cannot be set here; use model.headDtype")
    head = {} if options.head_dtype == "model" else {"head_dtype": options.head_dtype}
    return {**given, **head}


def _fault(what: str) -> SettingsError:
    return SettingsError(f"generator.engineArgs: {what}")
