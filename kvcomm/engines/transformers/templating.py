"""``Chat``: a tokenizer's chat template, as streams need it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcomm.streams.conversation import Markup, filler_id
from kvcomm.streams.templates import PROBE, Message, Rendered, rendered


@dataclass(frozen=True, slots=True)
class Chat:
    """A template that keeps what it rendered; :meth:`of` finds out."""

    tokenizer: PreTrainedTokenizerBase
    markup: Markup
    generation_prefix: tuple[int, ...]
    """What makes the model answer."""
    settings: dict[str, Any]

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        ends: Iterable[int] | None = None,
        fill: bool = True,
        probe: Sequence[Message] = PROBE,
        **settings: Any,
    ) -> Chat:
        """Render ``probe`` message by message and read ends, separator and generation prefix off it.

        Args:
            vocab_size: of the model.
            ends: ids that end a message; the tokenizer's end of sequence if not given.
            fill: whether messages are filled up to the border of a block.
            probe: messages of the kinds that streams will have.
            settings: for the template: ``tools``, ``enable_thinking``, ...

        Raises:
            TemplateError: the template rewrites what it rendered before.
            ConfigError: nothing ends a message, or no id can fill blocks.
        """
        eos = tokenizer.eos_token_id
        found = frozenset([eos] if ends is None and eos is not None else ends or ())
        whole = rendered(lambda messages, ask: _ids(tokenizer, messages, ask, settings), probe)
        filler = None
        if fill:
            used = frozenset(tokenizer.get_vocab().values())
            spare = _spare(tokenizer, whole)
            filler = filler_id(vocab_size, ends=found, pad=tokenizer.pad_token_id, used=used, spare=spare)
        markup = Markup(found, whole.separator(found), filler)
        return cls(tokenizer, markup, whole.generation_prefix, settings)

    def messages(self, messages: Sequence[Message], known: Sequence[Message] = ()) -> Rendered:
        """The ids of ``messages`` one by one, as the template renders them behind the ``known`` ones.

        Those of the known ones are in the stream, as they were fed and sampled; text is not tokenized again.

        Raises:
            TemplateError: the template rewrites what it rendered before, after all.
            ValueError: no messages.
        """
        return rendered(
            lambda some, ask: _ids(self.tokenizer, some, ask, self.settings),
            [*known, *messages],
            known=len(known),
        )


def _spare(tokenizer: PreTrainedTokenizerBase, conversation: Rendered) -> list[int]:
    """Special tokens that do not occur in a conversation; an end of text first, then as they are numbered."""
    occurring = {token for message in conversation.messages for token in message}
    occurring |= {*conversation.generation_prefix}
    special = {token: str(text) for token, text in tokenizer.added_tokens_decoder.items() if text.special}
    spare = sorted(special.keys() - occurring)
    return sorted(spare, key=lambda token: "endoftext" not in special[token])


def _ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ask: bool, settings: dict[str, Any]
) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=ask,
        tokenize=True,
        return_dict=False,
        **settings,
    )
    return ids
