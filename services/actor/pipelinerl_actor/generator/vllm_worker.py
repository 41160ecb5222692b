"""The worker that vLLM runs in the generator: vLLM's own, with weights that can be received and
replaced.

vLLM makes it by its name (`worker_cls`), in the engine's process or, with tensor parallelism, in
one process per worker. The engine calls the methods that begin with `weights_` through
`collective_rpc`. None of them blocks the decode for longer than its own work: what takes long runs
on a thread that reports its end (worker_thread.py).
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.nccl import unpinned_nccl_env

from pipelinerl_actor.generator.merged_weights import MergedWeights
from pipelinerl_actor.generator.metrics import TransferClock
from pipelinerl_actor.generator.vllm_copies import AdapterReload, Backup, Reload, StagingModel
from pipelinerl_actor.generator.vllm_options import ADAPTER_SCALE, STAGING
from pipelinerl_actor.generator.worker_thread import BackgroundWork, Ticket
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.nccl import on_transfer_stream
from pipelinerl_weights.slices import Block, whole_tensors
from pipelinerl_weights.snapshot import TensorAssembly
from pipelinerl_weights.transfer import receive

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class GeneratorWorker(BaseWorker):  # type: ignore[misc] # vLLM ships no types
    """vLLM's worker with a group, a second copy of the weights, and a thread for transfers. It
    receives the parts of the tensors that its own shard is made of.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._work = BackgroundWork(self.rank)
        self._group: TransferGroup | None = None
        self._manifest: Manifest | None = None
        self._needs: dict[str, tuple[Block, ...]] = {}
        """What this worker loads, by the hash of the manifest."""
        self._backup: Backup | None = None
        self._merged = self._merged_weights()
        self._update: AdapterReload | None = None
        self._served: dict[str, Tensor] = {}
        """The adapter that decodes; empty for none."""
        self._before: dict[str, Tensor] = {}
        """The adapter to roll back to, which with the frozen weights replaces a full backup."""
        self._in_place = Reload(self.model_runner.get_model(), self.vllm_config)
        self._staging: StagingModel | None = None
        if self.vllm_config.additional_config.get(STAGING):
            # Before vLLM sizes the KV cache, so that it takes only the memory that is left.
            self._staging = StagingModel(self.model_runner.get_model(), self.vllm_config)
        install_score_temperature(self.model_runner)

    def _merged_weights(self) -> MergedWeights | None:
        """None for a job whose updates bring whole weights."""
        scale = self.vllm_config.additional_config.get(ADAPTER_SCALE)
        if scale is None:
            return None
        fused = getattr(self.model_runner.get_model(), "packed_modules_mapping", None)
        return MergedWeights(Path(self.vllm_config.model_config.model), scale, fused)

    def weights_join(self, ticket: Sequence[Any], group: dict[str, Any]) -> None:
        rank = group.pop("rank_offset") + self.rank
        self._work.start(Ticket(*ticket), lambda: self._join(rank, group))

    def weights_leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def weights_manifest(self, document: dict[str, Any]) -> None:
        """The manifest of the updates that follow, in its JSON form."""
        self._manifest = Manifest.from_json(document)

    def weights_stage(self, ticket: Sequence[Any], version: int, timeout_s: float) -> None:
        assert self._staging is not None
        reload = self._reload(self._staging.reload)
        self._work.start(Ticket(*ticket), lambda: self._receive(reload, version, timeout_s))

    def weights_receive_in_place(
        self, ticket: Sequence[Any], version: int, timeout_s: float
    ) -> None:
        reload = self._reload(self._in_place)
        self._work.start(
            Ticket(*ticket), lambda: self._receive_in_place(reload, version, timeout_s)
        )

    def weights_back_up(self, ticket: Sequence[Any]) -> None:
        self._work.start(Ticket(*ticket), self._back_up)

    def weights_apply(self) -> None:
        assert self._staging is not None
        self._staging.swap_in()
        if self._update is not None:
            self._served = self._update.adapter

    def weights_roll_back(self) -> None:
        if self._update is not None:
            self._served = self._before
            self._update.undo(self._before)
        else:
            assert self._backup is not None, (
                "nothing was backed up, so the weights stay as they are: half of each version"
            )
            self._backup.restore()

    # On the worker's thread

    def _join(self, rank: int, group: dict[str, Any]) -> dict[str, Any]:
        self.weights_leave()
        address, port = group.pop("master_address"), group.pop("master_port")
        # Batch-invariant decoding pins NCCL's variables in this process, and NCCL hangs when the
        # members of a communicator differ in them.
        with unpinned_nccl_env():
            self._group = TransferGroup.join(address, port, rank=rank, device=self.device, **group)
        return {"rank": rank}

    def _back_up(self) -> dict[str, Any]:
        self._before = self._served
        if self._merged is None:
            # The old copy is freed first, so that host memory holds one at a time.
            self._backup = None
            self._backup = Backup(self.model_runner.get_model())
        return {}

    def _reload(self, reload: Reload) -> Reload | AdapterReload:
        self._update = None if self._merged is None else AdapterReload(reload, self._merged)
        return self._update or reload

    def _receive_in_place(
        self, reload: Reload | AdapterReload, version: int, timeout_s: float
    ) -> dict[str, Any]:
        result = self._receive(reload, version, timeout_s)
        if self._update is not None:
            self._served = self._update.adapter
        return result

    def _needed(self, reload: Reload | AdapterReload) -> tuple[Block, ...]:
        """Returns the blocks that this worker loads. An adapter is small and merged whole."""
        assert self._manifest is not None
        if isinstance(reload, AdapterReload):
            return whole_tensors(self._manifest)
        if self._manifest.hash not in self._needs:
            self._needs = {self._manifest.hash: reload.needed_blocks(self._manifest)}
        return self._needs[self._manifest.hash]

    def _receive(
        self, reload: Reload | AdapterReload, version: int, timeout_s: float
    ) -> dict[str, Any]:
        assert self._group is not None
        assert self._manifest is not None
        with on_transfer_stream(self.device):
            needs = self._needed(reload)
            reload.begin()
            clock = TransferClock()

            def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
                clock.arrived()
                with clock.loading():
                    reload.load(tensors)

            sink = TensorAssembly(self._manifest, load, needs, self.device)
            try:
                checksum = receive(self._group, self._manifest, version, timeout_s, sink)
                with clock.loading():
                    reload.complete()
            finally:
                # After a failure too: it restores the model's normal form, whatever was loaded.
                with clock.loading():
                    reload.end()
        return {"checksum": checksum, **clock.seconds()}


def install_score_temperature(runner: Any) -> None:
    """Makes the log-probabilities of prompts follow their request's temperature, as those of
    sampled tokens do.

    vLLM computes them from the raw logits: the runner calls the sampler's `compute_logprobs` for
    the requests that want them. Here it does so once per temperature, with the logits divided by
    it.
    """
    original: Callable[..., dict[str, Any]] = runner._get_prompt_logprobs_dict

    def at_temperature(*args: Any, **kwargs: Any) -> dict[str, Any]:
        waiting: dict[str, int] = runner.num_prompt_logprobs
        if not waiting:
            return {}
        by_temperature: dict[float, dict[str, int]] = {}
        for request_id, number in waiting.items():
            temperature = runner.requests[request_id].sampling_params.temperature
            by_temperature.setdefault(temperature, {})[request_id] = number
        result: dict[str, Any] = {}
        for temperature, requests in by_temperature.items():
            before = set(requests)
            runner.num_prompt_logprobs = requests
            runner.sampler.compute_logprobs = lambda logits, divisor=temperature or 1.0: (
                torch.log_softmax(logits.float() / divisor, dim=-1)
            )
            try:
                result.update(original(*args, **kwargs))
            finally:
                del runner.sampler.compute_logprobs
                runner.num_prompt_logprobs = waiting
            # The runner deletes finished requests from the mapping that it was given.
            for finished in before - requests.keys():
                waiting.pop(finished, None)
        return result

    runner._get_prompt_logprobs_dict = at_temperature
