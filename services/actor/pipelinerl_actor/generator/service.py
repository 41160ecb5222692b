"""Makes a running generator of a job and a model folder.

```
 engine starts, warms up -> HTTP is served -> (stop) -> drain -> HTTP ends -> engine ends
```
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from pipelinerl_actor.generator.app import RunningGenerator, create_app
from pipelinerl_actor.generator.engine import EngineOptions, GeneratorEngine
from pipelinerl_actor.generator.metrics import GeneratorMetrics
from pipelinerl_actor.generator.request_handler import RequestHandler, RequestLimits
from pipelinerl_actor.generator.updater import NOTHING_RECEIVED, WeightUpdater
from pipelinerl_actor.generator.vllm_options import prepare_environment
from pipelinerl_actor.generator.weight_layout import (
    AdapterLayout,
    ExpectedWeights,
    WeightLayout,
    read_config,
)
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.metrics import GENERATOR, REFERENCE, serve_metrics
from pipelinerl_common.service import Wiring, run_until_first
from pipelinerl_common.settings import GeneratorSettings, Job, load_job
from pipelinerl_common.tracing import open_tracer
from pipelinerl_control.plan import num_gpus
from pipelinerl_weights.device_watch import DeviceWatch, Nvml
from pipelinerl_weights.manifest import ITEM_BYTES

log = logging.getLogger(__name__)

_STOP_HTTP_S = 5
_MAX_HOST_KV_BYTES = 4 << 30


async def serve_generator(
    wiring: Wiring, model: Path, stop: asyncio.Event, *, version: int | None
) -> None:
    """Serves until `stop` is set: the folder's weights as `version`, or, with None, nothing before
    the first update.

    Raises SettingsError for a folder, an address or settings that cannot be used.
    """
    job, token = load_job(wiring.job_file), wiring.token
    role = role_of(job, wiring.name)
    version = NOTHING_RECEIVED if version is None else version
    with _bind(wiring.listen) as listening:
        engine = make_engine(
            job,
            role.settings,
            model,
            initial_version=version,
            takes_updates=role.takes_updates,
            log_level=wiring.log_level,
            needs_gpu=num_gpus(job, wiring.name) > 0,
        )
        generator = assemble(job, role, model, engine, version=version, token=token)
        async with (
            open_tracer(job, role.metrics_role, wiring.name) as generator.tracer,
            engine.running(),
            _watched_devices(generator, num_gpus(job, wiring.name)),
        ):
            # Not before: connections would wait for the engine instead of being refused.
            listening.listen()
            host, port = listening.getsockname()[:2]
            log.info(
                "listening=http://%s:%d engine=%s version=%d",
                host,
                port,
                role.settings.engine,
                version,
            )
            async with (
                serve_http(create_app(generator), listening),
                serve_metrics(wiring.metrics_listen, generator.metrics.exposition),
            ):
                await run_until_first(
                    _until_stopped(stop, generator), engine.watch(), generator.watch()
                )


def make_engine(
    job: Job,
    settings: GeneratorSettings,
    model: Path,
    *,
    initial_version: int,
    takes_updates: bool,
    log_level: str = "info",
    needs_gpu: bool = False,
) -> GeneratorEngine:
    """The engine that `settings` names, not running yet, and prepared for the job's updates if it
    `takes_updates`.

    Raises SettingsError for a folder that does not hold a model, or one whose weights no update
    would reach, and where the job gives the process a GPU that cannot be used.
    """
    # First: an engine would take a missing folder for a name on the hub.
    read_config(model)
    # Not at the top: errors in the settings appear before the seconds of this import.
    import torch

    from pipelinerl_weights.nccl import require_cuda

    if needs_gpu:
        require_cuda("actors.gpusPerReplica (or gpusPerReplica of this role)")

    spec = job.spec
    on_cpu = not torch.cuda.is_available()
    is_vllm = settings.engine == "vllm"
    if is_vllm and on_cpu and settings.kv_cache_bytes is None:
        kv_bytes = host_kv_bytes(job, settings, model)
        settings = settings.model_copy(update={"kv_cache_bytes": kv_bytes})
    adapter = spec.model.adapter if takes_updates else None
    options = EngineOptions(
        model=model,
        dtype=spec.model.dtype,
        head_dtype=spec.model.head_dtype,
        max_model_len=spec.model.max_model_len,
        settings=settings,
        initial_version=initial_version,
        can_stage=takes_updates and spec.weight_transfer.mode == "staged",
        on_cpu=on_cpu,
        takes_updates=takes_updates,
        adapter_scale=None if adapter is None else adapter.scale,
        engine_metrics=spec.telemetry.engine_metrics,
    )
    if not is_vllm:
        from pipelinerl_actor.generator.transformers_engine import TransformersEngine

        return TransformersEngine(options)
    # Before the import of vLLM, which reads the environment then.
    prepare_environment(log_level, on_cpu=on_cpu)
    from pipelinerl_actor.generator.vllm_engine import VllmEngine

    return VllmEngine(options)


def host_kv_bytes(job: Job, settings: GeneratorSettings, model: Path) -> int:
    """Bytes of KV cache for a generator on a CPU, where vLLM would take most of the memory: what
    all its sequences need at full length, a quarter more because blocks are not always full, and at
    most 4 GiB.
    """
    config = read_config(model)
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        token_bytes = (
            2 * config["num_hidden_layers"] * heads * head_dim * ITEM_BYTES[job.spec.model.dtype]
        )
    except (KeyError, TypeError) as error:
        raise SettingsError(
            f"generator.kvCacheBytes: set it, because {model / 'config.json'} has no {error}"
        ) from error
    needed = token_bytes * job.spec.model.max_model_len * settings.max_running_requests
    return int(min(_MAX_HOST_KV_BYTES, max(64 << 20, needed + needed // 4)))


@dataclass(frozen=True, slots=True)
class GeneratorRole:
    """The purpose of a generator, by its name. Those of the reference and of the evaluator serve
    the weights that they start with.
    """

    settings: GeneratorSettings
    takes_updates: bool = True
    metrics_role: str = GENERATOR


def role_of(job: Job, name: str) -> GeneratorRole:
    """Raises SettingsError for a reference in a job without one."""
    spec = job.spec
    if name.startswith("reference"):
        if spec.reference is None:
            raise SettingsError(f"--name {name}: the job has no spec.reference")
        return GeneratorRole(spec.reference.generator, takes_updates=False, metrics_role=REFERENCE)
    if name.startswith("evaluator"):
        own = spec.evaluation.generator if spec.evaluation is not None else None
        return GeneratorRole(own or spec.actors.generator, takes_updates=False)
    return GeneratorRole(spec.actors.generator)


def assemble(
    job: Job,
    role: GeneratorRole,
    model: Path,
    engine: GeneratorEngine,
    *,
    version: int,
    token: str | None,
) -> RunningGenerator:
    """The generator around an engine. Raises SettingsError for a folder without a model."""
    from transformers import AutoTokenizer

    config = read_config(model)
    vocabulary, positions = config.get("vocab_size"), config.get("max_position_embeddings")
    if not isinstance(vocabulary, int):
        raise SettingsError(f"{model / 'config.json'}: has no vocab_size")
    longest = job.spec.model.max_model_len
    if isinstance(positions, int) and longest > positions and not _scales_positions(config):
        raise SettingsError(
            f"model.maxModelLen={longest} is more than the model's {positions} positions; lower it"
        )
    metrics = GeneratorMetrics(job.name, role.metrics_role)
    metrics.watch(engine.load)
    limits = RequestLimits(
        job.spec.model.max_model_len, role.settings.max_running_requests, vocabulary
    )
    layout = WeightLayout.of_folder(model)
    adapter = job.spec.model.adapter
    expected: ExpectedWeights = layout if adapter is None else AdapterLayout(layout, adapter.rank)
    # The updater reports the running sequences, and the handler reads the updater's version.
    updater = WeightUpdater(
        engine,
        expected if role.takes_updates else None,
        metrics,
        initial_version=version,
        running=lambda: requests.num_running,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    requests = RequestHandler(
        engine, tokenizer, limits, metrics, lambda: updater.version, model=job.name
    )
    return RunningGenerator(
        engine, requests, updater, metrics, token, job.spec.actors.drain_seconds
    )


@asynccontextmanager
async def _watched_devices(generator: RunningGenerator, num_devices: int) -> AsyncIterator[None]:
    """Lets /health report a GPU that no longer answers, in a process that was given any."""
    nvml = Nvml.load() if num_devices else None
    if nvml is None:
        yield
        return
    watch = DeviceWatch(nvml.query)
    generator.device_fault = watch.fault
    try:
        yield
    finally:
        watch.close()


def _scales_positions(config: Mapping[str, Any]) -> bool:
    """Whether rotary embeddings reach beyond `max_position_embeddings`."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return bool(scaling.get("rope_type", scaling.get("type", "default")) != "default")


async def _until_stopped(stop: asyncio.Event, generator: RunningGenerator) -> None:
    """Waits for `stop` and then for the running sequences, at most `drain_s`; ends the process."""
    await stop.wait()
    if not await generator.requests.drain(generator.drain_s):
        log.warning(
            "running=%d cut off after %g s", generator.requests.num_running, generator.drain_s
        )


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--listen {listen}: cannot listen there: {error}") from error
    return listening


class _Server(uvicorn.Server):
    """A server that leaves signals to run_service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve_http(app: FastAPI, listening: socket.socket) -> AsyncIterator[None]:
    """Serves `app` on a listening socket, until the end of the block."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_STOP_HTTP_S,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
