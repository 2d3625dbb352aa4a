"""Templates that keep what they rendered, and those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvcomm.streams.conversation import Conversation, Markup
from kvcomm.streams.templates import PROBE, Message, TemplateError, rendered
from tests.kvcomm.streams.symbolic import SymbolicEngine

END = 256
"""Other ids are bytes."""


def text(value: str) -> list[int]:
    return list(value.encode())


def chatml(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    ids = []
    for message in messages:
        ids += [*text(f"<{message['role']}>{message['content']}"), END, *text("\n")]
    return ids + text("<assistant>") * add_generation_prompt


def drops_reasoning(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    """As templates of reasoning models do with answers that another question follows."""
    last = max(at for at, message in enumerate(messages) if message["role"] != "assistant")
    kept = [
        {**message, "content": message["content"].rpartition("</think>\n\n")[2]} if at < last else message
        for at, message in enumerate(messages)
    ]
    return chatml(kept, add_generation_prompt)


def counts_first(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    return text(f"{len(messages)} messages") + chatml(messages, add_generation_prompt)


def prefix_of_its_own(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    """The answers in a history do not begin with what makes the model answer."""
    return chatml(messages, False) + text("<assistant><no_think>") * add_generation_prompt


def ends_on_demand(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    """Without a generation prefix there is an end of text."""
    return chatml(messages, add_generation_prompt) + ([] if add_generation_prompt else [0])


def counts_in_its_prefix(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    ids: list[int] = []
    for at, message in enumerate(messages):
        ids += chatml([message], False) if message["role"] != "assistant" else [*text(f"<{at}>"), END, 10]
    return ids + text(f"<{len(messages)}>") * add_generation_prompt


def test_a_conversation_without_answers_yet_has_its_generation_prefix_too():
    question = [{"role": "user", "content": "One?"}]
    assert rendered(chatml, question).generation_prefix == tuple(text("<assistant>"))
    with pytest.raises(TemplateError, match="not always the same"):
        rendered(counts_in_its_prefix, [*question, {"role": "assistant", "content": "x"}, *question])


def test_the_ids_of_each_message_and_the_generation_prefix():
    found = rendered(chatml)
    assert len(found.messages) == 5
    assert found.messages[0] == (*text("<system>Answer."), END, 10)
    assert found.generation_prefix == tuple(text("<assistant>"))
    assert found.separator({END}) == (10,)
    assert [token for message in found.messages for token in message] == chatml(
        [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "<think>\nIt is one.\n</think>\n\nOne."},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "<think>\nIt is two.\n</think>\n\nTwo."},
        ],
        False,
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (drops_reasoning, "token 40 of .* otherwise once message 3 is there.*reasoning"),
        (counts_first, "token 0 of .* otherwise once message 1 is there"),
        (prefix_of_its_own, r"otherwise once the answer \(message 2\) is written"),
        (ends_on_demand, "otherwise once message 1 is there"),
        (counts_in_its_prefix, "the generation prefix is not always the same"),
    ],
)
def test_a_template_that_rewrites_what_it_rendered_is_refused(template: Callable, why: str):
    with pytest.raises(TemplateError, match=why):
        rendered(template)


def test_a_template_is_judged_by_messages_of_its_kind():
    """Without reasoning in the answers, the one that drops reasoning drops nothing."""
    plain = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Two?"},
    ]
    assert len(rendered(drops_reasoning, plain).messages) == 3
    with pytest.raises(ValueError, match="at least one message"):
        rendered(chatml, [])


def test_messages_that_are_known_are_rendered_once_and_not_given():
    renders = []

    def counted(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        renders.append(len(messages))
        return chatml(messages, add_generation_prompt)

    whole = rendered(chatml)
    part = rendered(counted, PROBE, known=3)
    assert part.messages == whole.messages[3:]
    assert part.generation_prefix == whole.generation_prefix
    assert sorted(renders) == [3, 4, 4, 5, 5]


def test_the_separator_is_one_and_the_same():
    def spaced(messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += chatml([message], False) + text(" ") * (message["role"] == "user")
        return ids + text("<assistant>") * add_generation_prompt

    with pytest.raises(TemplateError, match=r"come \[\(10,\), \(10, 32\)\]: one separator is needed"):
        rendered(spaced).separator({END})
    with pytest.raises(TemplateError, match="message 0 has no id that ends messages"):
        rendered(chatml).separator({999})


def test_what_a_template_renders_is_what_a_conversation_reads():
    found = rendered(chatml)
    session = SymbolicEngine().session()
    conversation = Conversation(session, Markup(frozenset({END}), found.separator({END}), filler=300))
    chunk = conversation.admit(found.messages, found.generation_prefix)
    session.commit(session.plan(chunk.tokens))
    assert conversation.scan() == 5
    assert len(session.turns) == 2
    fed = [token for at, token in enumerate(chunk.tokens) if at not in chunk.filler]
    assert fed == [token for message in found.messages for token in message] + list(found.generation_prefix)
