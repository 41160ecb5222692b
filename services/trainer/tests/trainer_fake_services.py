"""Fakes of the services that the trainer uses, behind our contracts: a preprocessor with given
batches, a coordinator with a real receiver in a real weight-transfer group, a generator that
completes with the tiny model.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import torch
import trainer_fakes as fakes
from torch import Tensor

from pipelinerl.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from pipelinerl_common import rpc
from pipelinerl_common.codec import micro_batch_to_proto, plan_to_proto
from pipelinerl_common.errors import Refused, TemporaryError, Unavailable
from pipelinerl_trainer.learner import RankBatch
from pipelinerl_weights.group import TransferGroup
from pipelinerl_weights.manifest import Manifest
from pipelinerl_weights.slices import whole_tensors
from pipelinerl_weights.snapshot import TensorAssembly
from pipelinerl_weights.transfer import receive

DEADLINE_S = 120.0


async def until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Waits for a condition that other tasks and threads bring about."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {timeout_s:g} s") from None


def rows_of(
    step: int, num_ranks: int
) -> tuple[list[fakes.Trajectory], list[list[list[fakes.Trajectory]]]]:
    """The batch of a step: everything, and the rows by rank. The same step always gives the same
    batch.
    """
    everything = fakes.trajectories(4, seed=100 + step)
    if num_ranks == 1:
        return everything, [[everything[:2], everything[2:]]]
    return everything, [[everything[:2], everything[2:3]], [everything[3:], []]]


@dataclass
class Preprocessor(batches_pb2_grpc.BatchesServicer):
    """Serves `rows_of(step)` for as many steps as there are, once something is published; knows the
    rules of the ledger.
    """

    num_steps: int = 4
    needs_publication: bool = True
    is_away: bool = False
    lost_ranks: set[int] = field(default_factory=set)
    """Ranks that are sent another assembly of the batch, once."""
    hold_at: int | None = None
    """This step's batch is not ready yet."""
    num_held: int = 0
    num_turned_away: int = 0
    poisoned_step: int | None = None
    """The batch of this step has an advantage that is not a number."""
    publish_after: Callable[[int], bool] = lambda step: True
    streams: bool = False
    """Batches come row by row."""
    replaced_steps: set[int] = field(default_factory=set)
    """Steps whose batch is replaced when its second row is requested, once."""
    may_publish: Callable[[int], bool] = lambda version: True
    num_publishes_held: int = 0
    pulls: list[tuple[int, str, int]] = field(default_factory=list)
    """(step, batch id, rows had) of each answered pull of a growing batch."""
    lost_commits: int | None = None
    """From this step on commits are turned away."""
    committed: int = 0
    trained: list[int] = field(default_factory=list)
    """Steps in the order of their commits."""
    last_seen: bool = False
    restores: list[tuple[int, bool]] = field(default_factory=list)
    """(steps, whether a snapshot came) of each rewind."""
    restore_ids: set[str] = field(default_factory=set)
    published: list[int] = field(default_factory=list)

    def _check(self) -> None:
        if self.is_away:
            self.num_turned_away += 1
            raise Unavailable("the preprocessor restarts")

    async def PullStep(
        self, request: batches_pb2.PullStepRequest, context: Any
    ) -> AsyncIterator[batches_pb2.PullStepResponse]:
        self._check()
        if not self.restores:
            raise Unavailable("not restored")
        if request.step != self.committed:
            raise Refused(f"step {request.step} is not the next, {self.committed}")
        reason = self._wait_reason(request.step)
        if reason:
            await asyncio.sleep(0.05)
            yield batches_pb2.PullStepResponse(wait=batches_pb2.Wait(reason=reason))
            return
        if request.step >= self.num_steps:
            yield batches_pb2.PullStepResponse(end=batches_pb2.EndOfRun())
            return
        everything, rows_by_rank = rows_of(request.step, request.num_ranks)
        rows = rows_by_rank[request.rank]
        if self.streams:
            for response in self._grow(request, fakes.parts_of(rows, everything, request.step)):
                yield response
            return
        batch_id = f"batch-{request.step}"
        if request.rank in self.lost_ranks:
            self.lost_ranks.discard(request.rank)
            batch_id = "another assembly"
        plan = fakes.plan_of(
            everything,
            request.step,
            len(rows),
            batch_id,
            publish_after=self.publish_after(request.step),
        )
        yield batches_pb2.PullStepResponse(plan=plan_to_proto(plan))
        for index, row in enumerate(rows):
            packed = fakes.pack(row, index)
            if self.poisoned_step == request.step:
                packed.advantages_L[packed.loss_mask_L == 1] = float("nan")
            yield batches_pb2.PullStepResponse(micro_batch=micro_batch_to_proto(packed))

    def _wait_reason(self, step: int) -> str:
        if self.needs_publication and not self.published:
            return "nothing is served yet"
        if step == self.hold_at:
            self.num_held += 1
            return "3 of 4 groups ready"
        return ""

    def _grow(
        self, request: batches_pb2.PullStepRequest, parts: list[RankBatch]
    ) -> Iterator[batches_pb2.PullStepResponse]:
        if request.first_micro_batch == 1:
            self.replaced_steps.discard(request.step)
        batch_id = (
            "to be replaced" if request.step in self.replaced_steps else f"batch-{request.step}"
        )
        num_had = request.first_micro_batch if request.batch_id == batch_id else 0
        self.pulls.append((request.step, request.batch_id, request.first_micro_batch))
        yield batches_pb2.PullStepResponse(
            plan=plan_to_proto(replace(parts[num_had].plan, batch_id=batch_id))
        )
        yield batches_pb2.PullStepResponse(
            micro_batch=micro_batch_to_proto(parts[num_had].micro_batches[0])
        )

    async def WaitPublishable(
        self, request: batches_pb2.WaitPublishableRequest, context: Any
    ) -> batches_pb2.WaitPublishableResponse:
        self._check()
        allowed = self.may_publish(request.policy_version)
        if not allowed:
            self.num_publishes_held += 1
            await asyncio.sleep(0.01)
        return batches_pb2.WaitPublishableResponse(allowed=allowed)

    async def CommitStep(
        self, request: batches_pb2.CommitStepRequest, context: Any
    ) -> batches_pb2.CommitStepResponse:
        self._check()
        if self.lost_commits is not None and request.step >= self.lost_commits:
            self.num_turned_away += 1
            raise Unavailable("the journal could not be written")
        if request.step == self.committed:
            self.committed += 1
            self.trained.append(request.step)
            self.last_seen = self.last_seen or request.last
        elif request.step != self.committed - 1:
            raise Refused(f"step {request.step} is not the current one, {self.committed}")
        return batches_pb2.CommitStepResponse()

    async def MarkPublished(
        self, request: batches_pb2.MarkPublishedRequest, context: Any
    ) -> batches_pb2.MarkPublishedResponse:
        self._check()
        self.published.append(request.policy_version)
        return batches_pb2.MarkPublishedResponse()

    async def GetSnapshot(
        self, request: batches_pb2.GetSnapshotRequest, context: Any
    ) -> batches_pb2.GetSnapshotResponse:
        self._check()
        if request.step != self.committed:
            raise Refused(f"step {request.step} expected, {self.committed} committed")
        snapshot = batches_pb2.LedgerSnapshot(
            schema_version=1,
            num_committed_steps=self.committed,
            next_prompt_index=7 * self.committed,
            incarnation=1,
        )
        return batches_pb2.GetSnapshotResponse(snapshot=snapshot)

    async def Restore(
        self, request: batches_pb2.RestoreRequest, context: Any
    ) -> batches_pb2.RestoreResponse:
        self._check()
        if request.restore_id in self.restore_ids:
            return batches_pb2.RestoreResponse(rewound=False)
        has_snapshot = request.HasField("snapshot")
        if has_snapshot and request.snapshot.num_committed_steps != request.num_committed_steps:
            raise Refused("the snapshot is of another step")
        self.restore_ids.add(request.restore_id)
        self.restores.append((request.num_committed_steps, has_snapshot))
        self.committed = request.num_committed_steps
        self.published.clear()
        return batches_pb2.RestoreResponse(rewound=True)


@dataclass
class Coordinator(weights_pb2_grpc.WeightTransferServicer):
    """One receiver, which it drives itself where the real coordinator would post to a generator."""

    trainer: str = ""
    epoch: int = 0
    is_away: bool = False
    on_probe: Callable[[], None] = lambda: None
    """Called when a client requests the group."""
    refuse_next: bool = False
    die_before_receiving: bool = False
    """The receiver of the next update leaves the group instead of receiving."""
    group: TransferGroup | None = None
    versions: list[int] = field(default_factory=list)
    rollbacks: list[bool] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    manifest: Manifest | None = None
    manifests: list[tuple[int, bool]] = field(default_factory=list)
    """Epoch of every attempted update, and whether it carried the manifest."""

    async def form(self) -> None:
        """Begins the next epoch with the receiver."""
        self.leave()
        self.epoch, self.manifest = self.epoch + 1, None
        timeout_s = 20.0
        num_trainer_ranks = (await self.policy()).num_ranks
        async with rpc.connect(self.trainer, token=None) as channel:
            response = await rpc.call(
                policy_pb2_grpc.PolicyStub(channel).JoinGroup,
                policy_pb2.JoinGroupRequest(
                    epoch=self.epoch,
                    world_size=num_trainer_ranks + 1,
                    backend="gloo",
                    port=0,
                    timeout_s=timeout_s,
                ),
                timeout_s=timeout_s,
                retry_s=DEADLINE_S,
            )
        self.group = await asyncio.to_thread(
            TransferGroup.join,
            response.master_address,
            response.master_port,
            rank=num_trainer_ranks,
            world_size=num_trainer_ranks + 1,
            backend="gloo",
            epoch=self.epoch,
            timeout_s=timeout_s,
        )

    def leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    async def policy(self) -> policy_pb2.GetPolicyResponse:
        async with rpc.connect(self.trainer, token=None) as channel:
            method = policy_pb2_grpc.PolicyStub(channel).GetPolicy
            return await rpc.call(
                method, policy_pb2.GetPolicyRequest(), timeout_s=5, retry_s=DEADLINE_S
            )

    async def GetGroup(
        self, request: weights_pb2.GetGroupRequest, context: Any
    ) -> weights_pb2.GetGroupResponse:
        if self.is_away:
            raise Unavailable("the coordinator restarts")
        self.on_probe()
        return weights_pb2.GetGroupResponse(epoch=self.epoch if self.group else 0)

    async def PublishVersion(
        self, request: weights_pb2.PublishVersionRequest, context: Any
    ) -> weights_pb2.PublishVersionResponse:
        if self.is_away:
            raise Unavailable("the coordinator restarts")
        if self.refuse_next or self.group is None or request.epoch != self.epoch:
            self.refuse_next = False
            raise Refused(f"epoch {request.epoch} is not the current one")
        if self.die_before_receiving:
            self.die_before_receiving = False
            self.leave()
            failed = weights_pb2.MemberResult(
                generator="generator-0-0", ok=False, error="no answer", policy_version=-1
            )
            return weights_pb2.PublishVersionResponse(published=False, members=[failed])
        self.manifests.append((request.epoch, request.HasField("manifest")))
        if request.HasField("manifest"):
            self.manifest = Manifest.from_proto(request.manifest)
        assert self.manifest is not None, "the first update of an epoch carries the manifest"
        received: dict[str, Tensor] = {}
        sink = TensorAssembly(self.manifest, received.update, whole_tensors(self.manifest))
        try:
            checksum = await asyncio.to_thread(
                receive, self.group, self.manifest, request.policy_version, request.timeout_s, sink
            )
        except TemporaryError as error:
            failed = weights_pb2.MemberResult(
                generator="generator-0-0", ok=False, error=str(error), policy_version=-1
            )
            return weights_pb2.PublishVersionResponse(published=False, members=[failed])
        self.weights = received
        self.versions.append(request.policy_version)
        self.rollbacks.append(request.allow_rollback)
        member = weights_pb2.MemberResult(
            generator="generator-0-0",
            ok=True,
            policy_version=request.policy_version,
            checksum=checksum,
            pause_s=0.25,
            transfer_s=0.5,
            apply_s=0.125,
        )
        return weights_pb2.PublishVersionResponse(published=True, members=[member])


@dataclass(frozen=True)
class Peers:
    preprocessor: Preprocessor
    coordinator: Coordinator
    preprocessor_address: str
    coordinator_address: str


@asynccontextmanager
async def serving(preprocessor: Preprocessor, coordinator: Coordinator) -> AsyncIterator[Peers]:
    """Both peers on the loopback interface."""
    services: Sequence[rpc.RpcService] = (
        rpc.RpcService(
            batches_pb2_grpc.add_BatchesServicer_to_server, preprocessor, "pipelinerl.v1.Batches"
        ),
        rpc.RpcService(
            weights_pb2_grpc.add_WeightTransferServicer_to_server,
            coordinator,
            "pipelinerl.v1.WeightTransfer",
        ),
    )
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                rpc.serve("127.0.0.1:0", [each], token=None, grace_s=0.5)
            )
            for each in services
        ]
        stack.callback(coordinator.leave)
        yield Peers(preprocessor, coordinator, servers[0].address, servers[1].address)


class Generator:
    """Answers /v1/chat/completions over HTTP with tokens and log-probabilities of the tiny model,
    in a thread.
    """

    def __init__(
        self, *, temperature_error: float = 1.0, busy: int = 0, token: str | None = None
    ) -> None:
        self.num_busy = busy
        """Requests that are turned away before the first answer."""
        self.num_answers = 0
        self.version = 0
        self.token = token
        self._temperature_error = temperature_error
        self._model = fakes.tiny_model()
        self._model.set_attn_implementation("sdpa")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Generator":
        Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        generator = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                authorized = (
                    generator.token is None
                    or self.headers["Authorization"] == f"Bearer {generator.token}"
                )
                status, body = (
                    generator.answer(request) if authorized else (401, {"error": "token"})
                )
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    @torch.no_grad()
    def answer(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.num_busy > 0:
            self.num_busy -= 1
            return 503, {"error": {"message": "no weights yet"}}
        self.num_answers += 1
        ids, sampler = (
            list(request["prompt_token_ids"]),
            torch.Generator().manual_seed(self.num_answers),
        )
        logprobs: list[float] = []
        for _ in range(request["max_tokens"]):
            logits = self._model(input_ids=torch.tensor([ids])).logits[0, -1]
            distribution = (
                logits / (request["temperature"] * self._temperature_error)
            ).log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=sampler))
            ids.append(token)
            logprobs.append(float(distribution[token]))
        choice = {
            "index": 0,
            "message": {"content": ""},
            "finish_reason": "length",
            "token_ids": ids[len(request["prompt_token_ids"]) :],
            "token_logprobs": logprobs,
            "weight_versions": [[self.version, len(logprobs)]],
        }
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return 200, {
            "model": "policy",
            "choices": [choice],
            "prompt_token_ids": request["prompt_token_ids"],
            "usage": usage,
        }
