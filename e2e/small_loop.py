"""The whole idea in one process: generation never stops, and new weights arrive between two tokens.

    python e2e/small_loop.py [--steps 30] [--eta 2]

     policy.may_admit                                finished groups      policy.take
    +-----------> Generator.decode_one_token ----------------------> ready ----------+
    |               one token for every running sequence                             v
    |               ^                                          Trainer.step: advantages, packing,
    |               | Generator.receive, between two tokens    truncated importance weights
    +---------------+<---------------------------------------------------------------+
     policy.published            WeightSnapshot, tensor by tensor

The parts are the product's own: the staleness policy (AReaL's rule), advantages, packing, the loss
and the weight snapshot. The services add that all of this happens at once, on many machines, and
survives the death of any of them; vLLM adds a KV cache, which keeps what older weights computed.
The model adds two digits right about every fifth time and learns the rest from a reward of 1.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from pipelinerl_actor.models.tiny import END_ID, PAD_ID, Recipe, cached_model, make_tokenizer
from pipelinerl_common.settings import JobSpec, load_job
from pipelinerl_common.types import (
    FinishReason,
    GroupId,
    Sample,
    SampleGroup,
    VersionRun,
    merge_runs,
)
from pipelinerl_preprocessor.batch import PackedBatch, RowLayout, assemble
from pipelinerl_preprocessor.preparation import Preparation, PreparedGroup
from pipelinerl_staleness.areal import Areal, ArealSettings
from pipelinerl_trainer.metrics import StepMetrics
from pipelinerl_trainer.model import load_policy
from pipelinerl_trainer.objective import Objective
from pipelinerl_trainer.packed import pack_row
from pipelinerl_weights.manifest import Manifest, TensorSpec
from pipelinerl_weights.snapshot import WeightSnapshot

JOB = Path(__file__).parent / "jobs/arithmetic.yaml"
CPU = torch.device("cpu")


@dataclass
class Trajectory:
    """One answer in the making.

    Example: a prompt of 6 tokens, "7" sampled by version 6 and the end token by version 7: tokens_S
    of 8, logprobs_T of 2, versions_T (6, 7).
    """

    tokens_S: list[int]
    num_given: int
    logprobs_T: list[float] = field(default_factory=list)
    versions_T: list[int] = field(default_factory=list)
    is_finished: bool = False


@dataclass
class Group:
    """One prompt and its answers, whose rewards are compared with one another."""

    right_answer: list[int]
    trajectories: list[Trajectory]


class Generator:
    """Decodes all running sequences, one token at a time, with the newest weights it received."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._weights = dict(self._model.named_parameters())
        self._sampling = spec.task.sampling
        self.version = 0

    @torch.no_grad()
    def receive(self, snapshot: WeightSnapshot, version: int) -> None:
        """Takes over new weights. Sequences that are running continue with them."""
        for name, tensor in snapshot.tensors():
            self._weights[name].copy_(tensor)
        self.version = version

    @torch.no_grad()
    def decode_one_token(self, running_B: list[Trajectory]) -> None:
        """Samples a token for each sequence, and keeps its log-probability and the version that
        sampled it: the loss needs both to weigh what older policies sampled.
        """
        lengths_B = torch.tensor([len(each.tokens_S) for each in running_B])
        input_ids_BS = torch.full((len(running_B), int(lengths_B.max())), PAD_ID)
        for row_S, each in zip(input_ids_BS, running_B, strict=True):
            row_S[: len(each.tokens_S)] = torch.tensor(each.tokens_S)
        # Attention is causal and the padding is on the right, so no token sees any of it.
        logits_BSV = self._model(input_ids=input_ids_BS).logits
        logits_BV = logits_BSV[torch.arange(len(running_B)), lengths_B - 1]
        logprobs_BV = torch.log_softmax(logits_BV / self._sampling.temperature, dim=-1)
        tokens_B = torch.multinomial(logprobs_BV.exp(), 1)
        chosen_B = logprobs_BV.gather(1, tokens_B)
        for each, token, logprob in zip(running_B, tokens_B, chosen_B, strict=True):
            each.tokens_S.append(int(token))
            each.logprobs_T.append(float(logprob))
            each.versions_T.append(self.version)
            full = len(each.versions_T) == self._sampling.max_tokens
            each.is_finished = full or int(token) == END_ID


class Trainer:
    """One optimizer step for each batch."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._model = load_policy(folder, spec, CPU)
        rate = spec.algorithm.optimizer.learning_rate
        self._optimizer = torch.optim.AdamW(self._model.parameters(), rate, weight_decay=0.0)
        self._max_grad_norm = spec.algorithm.optimizer.max_grad_norm
        self._objective = Objective(spec.algorithm, spec.task.sampling.max_tokens)
        row_tokens, temperature = spec.trainers.micro_batch_tokens, spec.task.sampling.temperature
        self._layout = RowLayout(1, row_tokens, temperature, reference=False, returns=False)
        weights = self._model.model_parameters()
        specs = tuple(TensorSpec(name, "float32", tuple(w.shape)) for name, w in weights)
        self._manifest = Manifest(specs, spec.weight_transfer.bucket_bytes)

    def step(self, step: int, groups: list[PreparedGroup]) -> tuple[PackedBatch, StepMetrics]:
        """Adds up the gradients of the packed rows; their sum does not depend on the packing."""
        batch = assemble(step, groups, self._layout, publish_after=True)
        normalizer = self._objective.normalizer(batch.plan)
        metrics = StepMetrics()
        for micro_batch in batch.rows[0]:
            row, columns = pack_row(micro_batch, CPU)
            row_loss = self._objective(self._model(row), columns)
            loss = row_loss.total / normalizer
            loss.backward()  # type: ignore[no-untyped-call]
            metrics.add_row(micro_batch, step, row_loss, loss.item())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return batch, metrics

    def snapshot(self) -> WeightSnapshot:
        return WeightSnapshot.pack(self._manifest, self._model.model_parameters())


class SmallLoop:
    """Decodes one token after another, and trains whenever the policy has a batch."""

    def __init__(self, folder: Path, spec: JobSpec, *, eta: int) -> None:
        torch.manual_seed(spec.seed)
        self._random = random.Random(spec.seed)
        self._spec = spec
        self._tokenizer = make_tokenizer()
        self._generator = Generator(folder, spec)
        self._trainer = Trainer(folder, spec)
        self._policy = Areal(ArealSettings(eta=eta), spec.algorithm.groups_per_step)
        self._preparation = Preparation(spec)
        self._running: dict[str, Group] = {}
        self._ready: dict[str, PreparedGroup] = {}
        self._num_admitted = 0

    def run(self, num_steps: int) -> Iterator[tuple[int, PackedBatch, StepMetrics]]:
        """Yields what each optimizer step trained. Sequences keep running across all of them."""
        step = 0
        while step < num_steps:
            self._admit()
            self._decode()
            if take := self._policy.take(step).groups:
                batch, metrics = self._trainer.step(step, [self._ready.pop(name) for name in take])
                step += 1
                self._generator.receive(self._trainer.snapshot(), step)
                self._policy.published(step)
                yield step, batch, metrics

    def _admit(self) -> None:
        """Starts new prompts while the policy allows it and the generator has room."""
        size = self._spec.task.group_size
        num_places = self._spec.actors.generator.max_running_requests
        while (len(self._running) + 1) * size <= num_places and self._policy.may_admit():
            left, right = self._random.randrange(10), self._random.randrange(10)
            name, self._num_admitted = f"0-{self._num_admitted}", self._num_admitted + 1
            given = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{left}+{right}="}],
                add_generation_prompt=True,
                return_dict=False,
            )
            right_answer = [*self._tokenizer.encode(str(left + right)), END_ID]
            trajectories = [Trajectory(list(given), len(given)) for _ in range(size)]
            self._running[name] = Group(right_answer, trajectories)
            self._policy.admitted(name)
            self._policy.started(name, self._generator.version)

    def _decode(self) -> None:
        trajectories = [each for group in self._running.values() for each in group.trajectories]
        if running := [each for each in trajectories if not each.is_finished]:
            self._generator.decode_one_token(running)
        for name, group in list(self._running.items()):
            if all(each.is_finished for each in group.trajectories):
                self._finish(name, self._running.pop(name))

    def _finish(self, name: str, group: Group) -> None:
        """Rewards the answers, and reports to the policy which version sampled the first token."""
        samples = tuple(
            Sample(
                index=index,
                token_ids_S=np.array(each.tokens_S, dtype=np.uint32),
                segment_lengths=(each.num_given, len(each.versions_T)),
                logprobs_T=np.array(each.logprobs_T, dtype=np.float32),
                version_runs=merge_runs(VersionRun(version, 1) for version in each.versions_T),
                reward=float(each.tokens_S[each.num_given :] == group.right_answer),
                finish_reason=FinishReason.STOP,
            )
            for index, each in enumerate(group.trajectories)
        )
        temperature = self._spec.task.sampling.temperature
        whole = SampleGroup("small", GroupId(name), 0, 0, temperature, samples, time.time())
        self._policy.first_token(name, whole.birth)
        prepared = self._preparation.prepare(whole)
        if isinstance(prepared, PreparedGroup):
            self._ready[name] = prepared
            self._policy.finished(name)
        else:
            self._policy.lost(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--eta", type=int, default=2, help="batches of head start; 0: synchronous")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/pipelinerl")
    arguments = parser.parse_args()
    loop = SmallLoop(cached_model(Recipe(), arguments.cache), load_job(JOB).spec, eta=arguments.eta)
    for step, batch, metrics in loop.run(arguments.steps):
        print(
            f"step {step:3}  reward {batch.plan.metrics['reward_mean']:.3f}  "
            f"lag {metrics.lag_mean.value:.2f} mean {metrics.lag_max.value:.0f} max  "
            f"ESS {metrics.ess.value:.3f}"
        )


if __name__ == "__main__":
    main()
