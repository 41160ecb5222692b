"""Messages as the tokens that a model sees: the generator's way, and that of whoever must know
their number before.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def chat_token_ids(tokenizer: Any, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """The messages in the model's chat template, with the beginning of an answer behind them.

    Raises whatever the template does: it is a program of the model's author, and may refuse
    messages in any way.
    """
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(map(int, encoded["input_ids"]))
