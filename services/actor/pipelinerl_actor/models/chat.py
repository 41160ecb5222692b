"""Messages as the tokens that a model sees: of a whole conversation, and of what follows an answer
that was sampled.

The generator renders and tokenises the first turn. Later turns must keep every sampled token as it
is, so only the text after the last answer is rendered: the template is applied to a short stand-in
conversation that ends in a marker and the new messages, and what follows the marker is tokenised.
It starts with the template's end of turn, which is left out when the answer has sampled it already.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl_actor.task import Message
from pipelinerl_common.errors import SettingsError


def chat_token_ids(tokenizer: Any, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """The messages in the model's chat template, followed by the start of an answer.

    Raises any exception: the template is a program of the model's author.
    """
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(map(int, encoded["input_ids"]))


_MARKER = "\x02marker\x03"


class Continuation:
    """Continues conversations of the model in `model_folder`. The tokenizer is loaded when it is
    first needed, which single-turn tasks never do.
    """

    def __init__(self, model_folder: Path) -> None:
        self._folder = model_folder
        self._tokenizer: Any = None
        self._loading = asyncio.Lock()

    async def token_ids(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens between the answer `sampled` and the next one: end of turn, `messages`,
        generation prompt.
        """
        # One load for all trajectories that need the tokenizer at the same time.
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._load)
        encoded = self._tokenizer(self._text(messages), add_special_tokens=False)
        ids: list[int] = encoded["input_ids"]
        # The answer has sampled the end of its turn itself, unless it ran into the token limit.
        has_ended = bool(sampled) and bool(ids) and sampled[-1] == ids[0]
        return ids[1:] if has_ended else ids

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
