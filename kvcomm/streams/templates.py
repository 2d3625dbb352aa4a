"""Whether a chat template is one that a stream can be written with, and its messages' ids.

A stream is only ever appended to.  So what a template renders for a conversation must begin with what it
rendered for the conversation without its last message; many do not (they drop the reasoning of earlier
answers, move a system text, count tokens or dates).  Found out by rendering, message by message, with and
without the generation prefix: no template is read, and any callable will do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm.errors import ConfigError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], Sequence[int]]
"""``render(messages, add_generation_prompt)`` -> token ids."""

WRITER = "assistant"
"""The role that the generation prefix begins a message of."""

PROBE: tuple[Message, ...] = (
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "One?"},
    {"role": WRITER, "content": "<think>\nIt is one.\n</think>\n\nOne."},
    {"role": "user", "content": "Two?"},
    {"role": WRITER, "content": "<think>\nIt is two.\n</think>\n\nTwo."},
)
"""Reasoning in the answers, for that is what templates drop once another question follows."""


class TemplateError(ConfigError):
    """A chat template that rewrites what it rendered before: a stream cannot be continued with it."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The ids of each message, as they follow one another; and what comes before an answer."""

    messages: tuple[tuple[int, ...], ...]
    generation_prefix: tuple[int, ...]

    def separator(self, ends: Container[int]) -> tuple[int, ...]:
        """What follows the end-of-message id, the same behind every message.

        Raises:
            TemplateError: a message has no such id, or what follows it differs.
        """
        found: set[tuple[int, ...]] = set()
        for place, message in enumerate(self.messages):
            after = next((at for at in range(len(message), 0, -1) if message[at - 1] in ends), None)
            if after is None:
                raise TemplateError(f"message {place} has no id that ends messages: name the template's")
            found.add(message[after:])
        if len(found) != 1:
            raise TemplateError(f"after the end of a message come {sorted(found)}: one separator is needed")
        return found.pop()


def rendered(render: Render, messages: Sequence[Message] = PROBE, *, known: int = 0) -> Rendered:
    """The ids of ``messages`` one by one, if the template is prefix-preserving.

    Args:
        render: the template; whatever it raises for roles that it does not know goes through.
        messages: at least one.  Of a template's kind, so with tools if it will have tools.
        known: so many of them are in the stream already: rendered in one go, and not among the answer's.

    Raises:
        TemplateError: it is not: an earlier message is rendered otherwise once a later one is there, or the
            generation prefix is not what the answer begins with.
    """
    if not 0 <= known < len(messages):
        raise ValueError("render at least one message that is not known")
    parts: list[tuple[int, ...]] = []
    before = tuple(render(messages[:known], False)) if known else ()
    prefixes: dict[tuple[int, ...], None] = {}
    for count in range(known + 1, len(messages) + 1):
        ids = tuple(render(messages[:count], False))
        _require_prefix(before, ids, f"message {count - 1} is there")
        if messages[count - 1]["role"] == WRITER and count > 1:
            asked = tuple(render(messages[: count - 1], True))
            _require_prefix(before, asked, "a generation prefix is asked for")
            _require_prefix(asked, ids, f"the answer (message {count - 1}) is written")
            prefixes[asked[len(before) :]] = None
        parts.append(ids[len(before) :])
        before = ids
    asked = tuple(render(messages, True))
    _require_prefix(before, asked, "a generation prefix is asked for")
    prefixes[asked[len(before) :]] = None
    if len(prefixes) != 1:
        raise TemplateError(f"the generation prefix is not always the same: {list(prefixes)}")
    return Rendered(tuple(parts), next(iter(prefixes)))


def _require_prefix(before: Sequence[int], ids: Sequence[int], once: str) -> None:
    if tuple(ids[: len(before)]) != tuple(before):
        at = next(
            (at for at, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(ids)
        )
        raise TemplateError(
            f"the template renders token {at} of {len(before)} otherwise once {once}: what was fed cannot be "
            "changed afterwards; use a template that keeps what it rendered (and reasoning, if it drops it)"
        )
