"""`tiny://arithmetic`: a character-level base model that adds one-digit numbers and is right about
every fifth time.

A sparse reward teaches a random model nothing in minutes, so the base gets a supervised start as
real base models have: first on right answers, until it knows them all, then on answers of which
only some are right, until it is as unsure as they are. What is left for reinforcement learning is
to prefer the answers that earn a reward.
"""

import hashlib
import json
import logging
import math
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from pipelinerl_actor.models import tiny

log = logging.getLogger(__name__)

_NUM_PROMPTS = 100
_MAX_ANSWER_TOKENS = 3
"""Two digits and the end token."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, beside the code. About 15 s on one core."""

    seed: int = 0
    hidden_size: int = 128
    num_layers: int = 2
    right_share: float = 0.22
    """Share of right answers in the second phase; the wrong ones are uniform over 0..18."""
    learn_steps: int = 80
    learn_rate: float = 2e-3
    learn_repeats: int = 1
    """Times that each of the 100 prompts is in a batch of the first phase."""
    doubt_steps: int = 100
    doubt_rate: float = 1e-3
    doubt_repeats: int = 4


@dataclass(frozen=True, slots=True)
class _Table:
    """All one-digit additions as token ids: prompts_PS, answers_AT (by sum, padded), sums_P."""

    prompts_PS: torch.Tensor
    answers_AT: torch.Tensor
    sums_P: torch.Tensor


def cached_model(recipe: Recipe, cache: Path) -> Path:
    """The folder of the recipe's model below `cache`, made first when it is not there.

    Two processes may do this at once: each makes its own in a temporary folder, and the first to
    rename it wins.
    """
    folder = cache / "models" / fingerprint(recipe)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        tiny.save(train(recipe), scratch)
        _make_readable(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _make_readable(folder: Path) -> None:
    """Temporary folders and safetensors files are private to their maker; a model is for every
    service.
    """
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def fingerprint(recipe: Recipe) -> str:
    """Hash of everything that determines the model: recipe, code, versions of torch and
    transformers.
    """
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for source in (Path(__file__), Path(tiny.__file__)):
        digest.update(source.read_bytes())
    digest.update(f"torch {torch.__version__} transformers {transformers.__version__}".encode())
    return f"arithmetic-{digest.hexdigest()[:16]}"


def train(recipe: Recipe) -> Qwen3ForCausalLM:
    """The model after both phases. The same recipe on the same machine gives the same weights."""
    table = _tabulate(tiny.make_tokenizer())
    model = tiny.make_model(tiny.TinyShape(recipe.hidden_size, recipe.num_layers), recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _fit(
            model,
            _Phase(recipe.learn_steps, recipe.learn_rate, recipe.learn_repeats, 1.0),
            table,
            generator,
        )
        _fit(
            model,
            _Phase(recipe.doubt_steps, recipe.doubt_rate, recipe.doubt_repeats, recipe.right_share),
            table,
            generator,
        )
        log.info(
            "model=tiny://arithmetic right=%.3f of sampled answers before training",
            success_share(model),
        )
    finally:
        torch.set_num_threads(num_threads)
    return model


@torch.no_grad()
def success_share(model: Qwen3ForCausalLM) -> float:
    """Exact probability that a completion sampled at temperature 1 is the right answer, averaged
    over the 100 prompts.
    """
    table = _tabulate(tiny.make_tokenizer())
    answers_PT = table.answers_AT[table.sums_P]
    logprobs_PTV = _answer_logits(model, table.prompts_PS, answers_PT).log_softmax(-1)
    logprobs_PT = logprobs_PTV.gather(2, answers_PT[:, :, None])[:, :, 0]
    return float(logprobs_PT.masked_fill(answers_PT == tiny.PAD_ID, 0.0).sum(1).exp().mean())


@dataclass(frozen=True, slots=True)
class _Phase:
    num_steps: int
    peak_rate: float
    repeats: int
    right_share: float


def _fit(model: Qwen3ForCausalLM, phase: _Phase, table: _Table, generator: torch.Generator) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.peak_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    indices_N = torch.arange(_NUM_PROMPTS).repeat(phase.repeats)
    for step in range(phase.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = phase.peak_rate * min(1.0, (step + 1) / 20) * (1 - step / phase.num_steps)
        is_right_N = torch.rand(len(indices_N), generator=generator) < phase.right_share
        guesses_N = torch.randint(0, len(table.answers_AT), (len(indices_N),), generator=generator)
        answers_NT = table.answers_AT[torch.where(is_right_N, table.sums_P[indices_N], guesses_N)]
        logits_NTV = _answer_logits(model, table.prompts_PS[indices_N], answers_NT)
        loss = torch.nn.functional.cross_entropy(
            logits_NTV.flatten(0, 1), answers_NT.flatten(), ignore_index=tiny.PAD_ID
        )
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"the supervised start diverged at step {step}: loss={loss.item()}"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _answer_logits(
    model: Qwen3ForCausalLM, prompts_NS: torch.Tensor, answers_NT: torch.Tensor
) -> torch.Tensor:
    """Logits of each answer token given the prompt and the answer before it: N, T, V."""
    logits: torch.Tensor = model(
        input_ids=torch.cat([prompts_NS, answers_NT], 1), use_cache=False
    ).logits
    return logits[:, prompts_NS.shape[1] - 1 : -1]


def _tabulate(tokenizer: PreTrainedTokenizerFast) -> _Table:
    pairs = [(left, right) for left in range(10) for right in range(10)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{left}+{right}="}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for left, right in pairs
    ]
    answers = [tokenizer(f"{total}{tiny.END}").input_ids for total in range(19)]
    padded = [answer + [tiny.PAD_ID] * (_MAX_ANSWER_TOKENS - len(answer)) for answer in answers]
    return _Table(
        torch.tensor(prompts),
        torch.tensor(padded),
        torch.tensor([left + right for left, right in pairs]),
    )
