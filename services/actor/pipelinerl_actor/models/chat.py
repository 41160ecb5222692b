"""Messages as the tokens that a model sees: the generator's way, and that of whoever must know
their number before.

Token ids of what a chat template puts between a sampled answer and the next one.

The generator renders and tokenises the first turn. Later turns must keep every sampled token as it
is, so only the text after the last answer is rendered here: the template is applied to a short
stand-in conversation that ends in a marker and the new messages, and what follows the marker is
tokenised. It starts with the template's end of turn, which the answer has often sampled already:
then that token is left out.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl_actor.task import Message
from pipelinerl_common.errors import SettingsError


def chat_token_ids(tokenizer: Any, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """The messages in the model's chat template, with the beginning of an answer behind them.

    Raises whatever the template does: it is a program of the model's author, and may refuse
    messages in any way.
    """
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(map(int, encoded["input_ids"]))


_MARKER = "\x02marker\x03"


class Continuation:
    """Loads the tokenizer of `model_folder` when it is first needed, which single-turn tasks never
    do.
    """

    def __init__(self, model_folder: Path) -> None:
        self._folder = model_folder
        self._tokenizer: Any = None
        self._loading = asyncio.Lock()

    async def token_ids(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """What comes between the answer `sampled` and the next answer: end of turn, `messages`,
        generation prompt.
        """
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._load)
        ids: list[int] = self._tokenizer(self._text(messages), add_special_tokens=False)[
            "input_ids"
        ]
        ended = (
            bool(sampled) and bool(ids) and sampled[-1] == ids[0]
        )  # the answer sampled the end of its turn itself
        return ids[1:] if ended else ids

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder)
        if not tokenizer.chat_template:
            raise SettingsError(
                f"the model in {self._folder} has no chat template, which multi-turn tasks need"
            )
        return tokenizer

    def _text(self, messages: Sequence[Message]) -> str:
        stand_in = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _MARKER},
            *messages,
        ]
        text: str = self._tokenizer.apply_chat_template(
            stand_in, tokenize=False, add_generation_prompt=True
        )
        before, found, after = text.partition(_MARKER)
        if not found or not before:
            raise SettingsError(
                f"the chat template of {self._folder} drops earlier answers, so turns cannot be "
                "continued exactly"
            )
        return after
