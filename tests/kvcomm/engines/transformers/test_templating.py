"""Chat templates of a tokenizer, read by rendering."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from kvcomm.engines.transformers.templating import Chat
from kvcomm.errors import ConfigError
from kvcomm.streams.templates import TemplateError
from tests.models import VOCAB_SIZE, tiny_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_REASONING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>\n\n')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = template
    return tokenizer


def test_ends_separator_and_filler_are_read_off_the_template():
    tokenizer = tokenizer_with(CHATML)
    vocab_size = len(tokenizer) + 5
    chat = Chat.of(tokenizer, vocab_size)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.markup.ends == {end}
    assert tokenizer.decode(chat.markup.separator) == "\n"
    assert tokenizer.decode(chat.generation_prefix) == "<|im_start|>assistant\n"
    filler = chat.markup.filler
    assert filler == (vocab_size - 1 if tokenizer.pad_token_id in (None, end) else tokenizer.pad_token_id)


def test_messages_come_out_one_by_one_behind_those_that_are_known():
    tokenizer = tokenizer_with(CHATML)
    chat = Chat.of(tokenizer, len(tokenizer) + 5)
    known = [{"role": "system", "content": "plan"}, {"role": "user", "content": "a tool"}]
    (answer,) = chat.messages([{"role": "assistant", "content": "reads"}], known).messages
    assert tokenizer.decode(answer) == "<|im_start|>assistant\nreads<|im_end|>\n"
    assert answer[: len(chat.generation_prefix)] == chat.generation_prefix
    with pytest.raises(ValueError, match="at least one message"):
        chat.messages([], known)


def test_a_template_that_drops_reasoning_is_refused():
    with pytest.raises(TemplateError, match="once message 3 is there"):
        Chat.of(tokenizer_with(DROPS_REASONING), VOCAB_SIZE + 8)


def test_without_unused_ids_a_special_token_that_a_conversation_does_without_fills():
    tokenizer = tokenizer_with(CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    special = ["<file>", "<|endoftext|>", "<|im_start|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    filler = Chat.of(tokenizer, len(tokenizer)).markup.filler
    assert tokenizer.convert_ids_to_tokens(filler) == "<|endoftext|>"


def test_without_any_there_is_no_filler_unless_it_is_not_wanted():
    tokenizer = tokenizer_with(CHATML)
    special = {*tokenizer.added_tokens_decoder} - {tokenizer.convert_tokens_to_ids("<|im_start|>")}
    with pytest.raises(ConfigError, match="ids are in use"):
        Chat.of(tokenizer, len(tokenizer), ends=special)
    assert Chat.of(tokenizer, len(tokenizer), fill=False).markup.filler is None
    with pytest.raises(TemplateError, match="message 0 has no id that ends messages"):
        Chat.of(tokenizer, len(tokenizer), ends=[0], fill=False)
