"""The process environment that vLLM reads. This is the only place that sets it, and it runs before
vllm is imported.
"""

import logging
import os
from collections.abc import MutableMapping

_FIXED = {
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
    """Sets what vLLM needs. `on_cpu`: leave cores to the other processes of the job instead of
    binding to them.
    """
    environ.update(_FIXED)
    level = "DEBUG" if log_level == "debug" else "ERROR"
    environ["VLLM_LOGGING_LEVEL"] = level
    logging.getLogger("vllm").setLevel(level)
    if on_cpu:
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # a single worker then lives in the engine core's process
        )
        # The model runs eagerly there; to compile vLLM's few compiled helpers takes a C++ compiler,
        # which an image may lack.
        environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
