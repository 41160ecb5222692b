"""A real generator process, a client for it, and a trainer that sends it weights."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipelinerl_weights.errors import TransferFailed
from pipelinerl_weights.group import Rendezvous, TransferGroup
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.slices import Block
from pipelinerl_weights.snapshot import WeightSnapshot
from pipelinerl_weights.transfer import SendReport, send_snapshot

START_S = 240.0
CALL_S = 120.0
TOKEN = "the job's token"
MAX_MODEL_LEN = 1024
BUCKET_BYTES = 16 << 10
"""The tiny model then travels in many buckets."""

Weights = Mapping[str, Tensor]

ENGINES = [
    pytest.param({"engine": "transformers"}, id="transformers"),
    pytest.param({"engine": "vllm", "prefixCaching": True}, id="vllm", marks=pytest.mark.vllm),
]
UPDATES = [(mode, kv) for mode in ("staged", "inplace") for kv in ("keep", "recompute")]
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
CLOSE = 1e-4
"""Log-probabilities nearer than this are of the same weights, in float32."""
DIFFERENT = 1e-2
"""Those further apart are not."""


def write_job(folder: Path, **generator: Any) -> Path:
    """A job file whose generator has these settings."""
    settings = {"maxRunningRequests": 8, "kvCacheBytes": 64 << 20, **generator}
    job = {
        "apiVersion": "pipelinerl.dev/v1alpha1",
        "kind": "PipelineRLJob",
        "metadata": {"name": "conformance"},
        "spec": {
            "model": {
                "uri": str(folder / "model"),
                "dtype": "float32",
                "maxModelLen": MAX_MODEL_LEN,
            },
            "task": {
                "path": "pipelinerl_actor.tasks.arithmetic:Arithmetic",
                "sampling": {"maxTokens": 64},
            },
            "actors": {"generator": settings, "drainSeconds": 20},
            "trainers": {"microBatchTokens": MAX_MODEL_LEN},
            "weightTransfer": {"backend": "gloo"},
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


class GeneratorProcess:
    """`python -m pipelinerl_actor.generator` on a free port."""

    def __init__(self, folder: Path, job: Path, *flags: str) -> None:
        token_file = folder / "token"
        token_file.write_text(TOKEN + "\n", encoding="utf-8")
        command = [
            *(
                sys.executable,
                "-m",
                "pipelinerl_actor.generator",
                "--job",
                str(job),
                "--output",
                str(folder),
            ),
            *(
                "--listen",
                "127.0.0.1:0",
                "--token-file",
                str(token_file),
                "--name",
                "generator-0-0",
                *flags,
            ),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.log: list[str] = []
        self._listening = threading.Event()
        self._url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Waits until it serves."""
        if not self._listening.wait(START_S) or not self._url:
            raise AssertionError("the generator did not start:\n" + "".join(self.log[-60:]))
        return self._url

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """Ends it and every worker of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        self._reader.join(60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening=(http://\S+)", line):
                self._url = found[1]
                self._listening.set()
        self.process.stderr.close()
        self._listening.set()


@dataclass
class Client:
    """HTTP to one generator. Every call is a connection of its own, as the coordinator's are."""

    url: str
    token: str | None = TOKEN

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.request(method, self.url + path, json=body) as response,
        ):
            return response.status, await (
                response.json() if "json" in response.content_type else response.text()
            )

    async def complete(self, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        body = {"prompt_token_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        status, answer = await self.call("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return dict(answer)

    async def choice(self, prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        return dict((await self.complete(prompt, max_tokens, **fields))["choices"][0])

    async def weights(self) -> dict[str, Any]:
        status, answer = await self.call("GET", "/weights")
        assert status == 200
        return dict(answer)


@dataclass
class Trainer:
    """Rank 0 of weight-transfer groups with one generator, as the trainer and the coordinator would
    drive them.
    """

    client: Client
    bucket_bytes: int = BUCKET_BYTES
    epoch: int = 0
    group: TransferGroup | None = None
    version: int = 0
    num_workers: int = 1
    reports: list[SendReport] = field(default_factory=list)

    async def form(self, timeout_s: float = CALL_S) -> TransferGroup:
        """A new epoch with the generator as the only member."""
        self.leave()
        self.epoch = max(self.epoch, int((await self.client.weights())["epoch"])) + 1
        world_size = 1 + self.num_workers
        rendezvous = Rendezvous.open("127.0.0.1", 0, world_size)
        body = {
            "epoch": self.epoch,
            "master_address": "127.0.0.1",
            "master_port": rendezvous.port,
            "rank_offset": 1,
            "world_size": world_size,
            "backend": "gloo",
            "timeout_s": timeout_s,
        }
        post = asyncio.create_task(self.client.call("POST", "/init_process_group", body))
        self.group = await asyncio.to_thread(
            TransferGroup.join,
            "127.0.0.1",
            rendezvous.port,
            rank=0,
            world_size=world_size,
            backend="gloo",
            epoch=self.epoch,
            timeout_s=timeout_s,
            store=rendezvous,
        )
        ranks = list(range(1, world_size))
        assert await post == (200, {"epoch": self.epoch, "ranks": ranks})
        return self.group

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None

    def request(
        self, weights: Weights, version: int, **fields: Any
    ) -> "asyncio.Task[tuple[int, Any]]":
        """POST /request_weight_update, under way."""
        body = {
            "epoch": self.epoch,
            "version": version,
            "manifest": manifest_of(weights, self.bucket_bytes).to_json(),
            "timeout_s": CALL_S,
            **fields,
        }
        return asyncio.create_task(self.client.call("POST", "/request_weight_update", body))

    async def update(
        self, weights: Weights, pace: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """A whole update to the next version; forms a group when there is none."""
        group = (
            self.group
            if self.group is not None and self.group.aborted is None
            else await self.form()
        )
        self.version = fields.pop("version", self.version + 1)
        snapshot = WeightSnapshot.pack(manifest_of(weights, self.bucket_bytes), weights.items())
        post = self.request(weights, self.version, **fields)
        report = await asyncio.to_thread(send_snapshot, group, snapshot, self.version, CALL_S, pace)
        status, answer = await post
        assert status == 200, answer
        assert answer["version"] == self.version
        assert answer["checksum"] == report.checksum
        now = await self.client.weights()
        assert (now["version"], now["checksum"], now["epoch"]) == (
            self.version,
            report.checksum,
            self.epoch,
        )
        self.reports.append(report)
        return dict(answer)


class HalfSnapshot(WeightSnapshot):
    """Lets something happen when half of the bytes have been read."""

    def read(self, pieces: Iterable[tuple[Block, torch.Tensor]]) -> None:
        pieces = list(pieces)
        super().read(pieces)
        seen = self.__dict__
        seen["num_read"] = seen.get("num_read", 0) + sum(len(buffer) for _, buffer in pieces)
        if seen["num_read"] > self.num_bytes / 2 and "act" in seen:
            seen.pop("act")()


def send_half(
    group: TransferGroup,
    weights: Weights,
    bucket_bytes: int,
    version: int,
    act: Callable[[], object],
) -> None:
    """Sends weights; in the middle `act` ends the group."""
    snapshot = HalfSnapshot.pack(manifest_of(weights, bucket_bytes), weights.items())
    snapshot.__dict__["act"] = act
    with pytest.raises(TransferFailed):
        send_snapshot(group, snapshot, version, CALL_S)
    assert "act" not in snapshot.__dict__


async def trainer_of(client: Client) -> Trainer:
    """A trainer that continues from the version that the generator has."""
    return Trainer(client, version=max(0, int((await client.weights())["version"])))


def difference(left: list[float], right: list[float]) -> float:
    """The largest."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def manifest_of(weights: Weights, bucket_bytes: int = BUCKET_BYTES) -> Manifest:
    specs = (
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in weights.items()
    )
    return Manifest(tuple(specs), bucket_bytes)


@dataclass
class Reference:
    """The same model in transformers, for what the log-probabilities should be."""

    folder: Path
    model: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }

    def random(self, seed: int) -> dict[str, Tensor]:
        """Other weights, about as large as the model's."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.weights.items()
        }

    def constant(self, token: int) -> dict[str, Tensor]:
        """Weights that always sample `token`: nothing but the embedding, all ones, reaches the
        output layer.
        """
        weights = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        weights["model.embed_tokens.weight"].fill_(1.0)
        weights["model.norm.weight"].fill_(1.0)
        weights["lm_head.weight"][token] = 1.0
        return weights

    @torch.no_grad()
    def logprobs(
        self, weights: Weights, prompt: list[int], sampled: list[int], temperature: float = 1.0
    ) -> list[float]:
        """Log-probabilities of the sampled tokens, all under `weights`."""
        return self.hybrid_logprobs(weights, weights, prompt, sampled, 0, temperature)

    @torch.no_grad()
    def hybrid_logprobs(
        self,
        old: Weights,
        new: Weights,
        prompt: list[int],
        sampled: list[int],
        switch: int,
        temperature: float = 1.0,
    ) -> list[float]:
        """Log-probabilities of sampled[switch:] under `new`, where the keys and values of all that
        was processed before are from `old`.

        When the switch falls between the sampled tokens `switch` - 1 and `switch`, the last token
        that `old` processed is the one before the former.
        """
        tokens = torch.tensor([prompt + sampled])
        first = len(prompt) + switch - 1 if switch else 0
        cache = None
        if first:
            self.model.load_state_dict(dict(old), strict=False)
            cache = self.model(tokens[:, :first], use_cache=True).past_key_values
        self.model.load_state_dict(dict(new), strict=False)
        logits = self.model(tokens[:, first:], past_key_values=cache, use_cache=True).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)
        at = len(prompt) + switch - 1 - first
        targets = tokens[0, len(prompt) + switch :]
        result: list[float] = (
            logprobs[at : at + len(targets)].gather(-1, targets[:, None])[:, 0].tolist()
        )
        return result


@contextlib.contextmanager
def prompt_end(limit_s: float = 40.0) -> Iterator[None]:
    """The body must end well before the deadlines of the calls in it."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < limit_s


async def until(condition: Any, limit_s: float = 30.0) -> None:
    """Asks again and again, until it holds."""
    deadline = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come about in time"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(*tasks: "asyncio.Task[Any]") -> AsyncIterator[None]:
    """Cancels what is left of `tasks` at the end."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
