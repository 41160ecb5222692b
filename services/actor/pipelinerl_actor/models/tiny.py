"""A tiny Qwen3 with a character-level tokenizer, in Hugging Face format: loads in a second.

Vocabulary: 7 special tokens, the printable ASCII characters and the newline, filled up to 128 ids.
One character is one token. A chat turn is `<|user|>3+4=<|end|>`; the generation prompt is
`<|assistant|>`, and `<|end|>` ends a completion.

`tiny://arithmetic` is such a model after a supervised start: a base model that adds one-digit
numbers and is right about every fifth time. A sparse reward teaches a random model nothing in
minutes, so the base is trained first on right answers, until it knows them all, then on answers of
which only some are right, until it is as unsure as they are. Reinforcement learning then only has
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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

log = logging.getLogger(__name__)

VOCAB_SIZE = 128
PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = (PAD, UNKNOWN, END, *ROLES)
PAD_ID, END_ID = SPECIAL_TOKENS.index(PAD), SPECIAL_TOKENS.index(END)
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_NUM_PROMPTS = 100
_MAX_ANSWER_TOKENS = 3
"""Two digits and the end token."""


def make_tokenizer(max_model_len: int = 1024) -> PreTrainedTokenizerFast:
    """The character-level tokenizer. Characters outside ASCII become `<|unknown|>`."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    tokens += [f"<|unused_{number}|>" for number in range(VOCAB_SIZE - len(tokens))]
    tokenizer = Tokenizer(
        models.WordLevel({token: id_ for id_, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_model_len,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a tiny Qwen3. Heads have dimension 32; there are half as many key-value heads, at
    least one.
    """

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    tie_word_embeddings: bool = False
    max_model_len: int = 1024


def make_model(shape: TinyShape, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of random float32 weights; the same arguments give the same weights."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=max(1, shape.num_heads // 2),
        head_dim=32,
        max_position_embeddings=shape.max_model_len,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float()


def make_tiny_model(
    folder: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    tie_word_embeddings: bool = False,
    seed: int = 0,
) -> Path:
    """Writes a random tiny model with its tokenizer into `folder`, which is made when missing.

    64 x 2 is 0.1 M parameters. With `num_heads` of 4 or more it can be split over two
    tensor-parallel workers.
    """
    shape = TinyShape(hidden_size, num_layers, num_heads, tie_word_embeddings)
    save(make_model(shape, seed), folder)
    return folder


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Writes `model` and the tokenizer that goes with it into `folder`, in Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(model.config.max_position_embeddings).save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the weights, besides the code. About 15 s on one core."""

    seed: int = 0
    hidden_size: int = 128
    num_layers: int = 2
    right_share: float = 0.22
    """Share of right answers in the second phase; the wrong ones are uniform over 0..18."""
    learn_steps: int = 80
    learn_rate: float = 2e-3
    learn_repeats: int = 1
    """Times that a batch of the first phase contains each of the 100 prompts."""
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
    """The folder of the recipe's model below `cache`, made when missing.

    Two processes may do this at once: each makes its own in a temporary folder, and the first one
    that renames it wins.
    """
    folder = cache / "models" / fingerprint(recipe)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        save(train(recipe), scratch)
        # Temporary folders and safetensors files are private to their user; services may be others.
        scratch.chmod(0o755)
        for path in scratch.iterdir():
            path.chmod(0o644)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def fingerprint(recipe: Recipe) -> str:
    """Hash of everything that determines the model: recipe, code, versions of torch and
    transformers.
    """
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    digest.update(Path(__file__).read_bytes())
    digest.update(f"torch {torch.__version__} transformers {transformers.__version__}".encode())
    return f"arithmetic-{digest.hexdigest()[:16]}"


def train(recipe: Recipe) -> Qwen3ForCausalLM:
    """The model after both phases. The same recipe on the same machine gives the same weights."""
    table = _tabulate(make_tokenizer())
    model = make_model(TinyShape(recipe.hidden_size, recipe.num_layers), recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    num_threads = torch.get_num_threads()
    # One thread, since sums in another order would give other weights.
    torch.set_num_threads(1)
    try:
        for phase in (
            _Phase(recipe.learn_steps, recipe.learn_rate, recipe.learn_repeats, 1.0),
            _Phase(recipe.doubt_steps, recipe.doubt_rate, recipe.doubt_repeats, recipe.right_share),
        ):
            _fit(model, phase, table, generator)
        log.info(
            "model=tiny://arithmetic right=%.3f of sampled answers before training",
            success_share(model),
        )
    finally:
        torch.set_num_threads(num_threads)
    return model


@torch.no_grad()
def success_share(model: Qwen3ForCausalLM) -> float:
    """Exact probability that a completion sampled at temperature 1 is right, averaged over the 100
    prompts.
    """
    table = _tabulate(make_tokenizer())
    answers_PT = table.answers_AT[table.sums_P]
    logprobs_PTV = _answer_logits(model, table.prompts_PS, answers_PT).log_softmax(-1)
    logprobs_PT = logprobs_PTV.gather(2, answers_PT[:, :, None])[:, :, 0]
    return float(logprobs_PT.masked_fill(answers_PT == PAD_ID, 0.0).sum(1).exp().mean())


@dataclass(frozen=True, slots=True)
class _Phase:
    """One phase of the supervised start."""

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
            logits_NTV.flatten(0, 1), answers_NT.flatten(), ignore_index=PAD_ID
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
    answers = [tokenizer(f"{total}{END}").input_ids for total in range(19)]
    padded = [answer + [PAD_ID] * (_MAX_ANSWER_TOKENS - len(answer)) for answer in answers]
    return _Table(
        torch.tensor(prompts),
        torch.tensor(padded),
        torch.tensor([left + right for left, right in pairs]),
    )
