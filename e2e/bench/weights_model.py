"""The model of the weights bench: a random Qwen3 in float32 of a given size, with the tiny model's
tokenizer.
"""

from pathlib import Path

HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 768, 2048, 12, 4, 64
MAX_MODEL_LEN = 1024
FLOAT32_BYTES = 4
MEGABYTE = 1_000_000


def num_layers(megabytes: int) -> int:
    """Decoder layers that come to `megabytes` of float32 weights or a little more; one layer is 25
    MB.
    """
    attention = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KEY_VALUE_HEADS)
    layer_bytes = FLOAT32_BYTES * (attention + 3 * HIDDEN * INTERMEDIATE)
    return -(-megabytes * MEGABYTE // layer_bytes)


def make_model(folder: Path, megabytes: int, seed: int) -> None:
    """Writes the model into `folder`, in Hugging Face format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from pipelinerl_actor.models import tiny

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers(megabytes),
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tiny.SPECIAL_TOKENS.index(tiny.END),
        pad_token_id=tiny.SPECIAL_TOKENS.index(tiny.PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tiny.save(Qwen3ForCausalLM(config).float(), folder)
