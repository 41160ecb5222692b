"""A tiny Qwen3 with a character-level tokenizer, in Hugging Face format: loads in a second.

Vocabulary: 7 special tokens, the printable ASCII characters and the newline, filled up to 128 ids.
One character is one token. A chat turn is `<|user|>3+4=<|end|>`; the generation prompt is
`<|assistant|>`, and `<|end|>` ends a completion.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
    """Writes a random tiny model with its tokenizer into `folder` (made when absent) and returns
    it.

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
