"""Words that several threads and processes change at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.words import Words
from tests.peers import soon

WORD = 24
"""An offset."""


class Mapped:
    """A file's words, seen through file descriptions of their own; as two processes would see them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_bytes(bytes(4096))
        self.words = memoryview(bytearray(4096)).cast("Q")
        self.descriptors: list[int] = []

    def open(self, **options) -> Words:
        self.descriptors.append(os.open(self.path, os.O_RDWR))
        return Words(self.words, self.descriptors[-1], **options)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def mapped(tmp_path):
    mapped = Mapped(tmp_path / "words")
    yield mapped
    mapped.close()


class Dying(Words):
    """Keeps the lock on a word, like a process that is stopped between its load and its store."""

    def hold(self, offset: int) -> None:
        assert self._hold(offset)

    def let_go(self, offset: int) -> None:
        self._let_go(offset)


def test_fetch_add_returns_what_was_there_and_wraps(mapped):
    words = mapped.open()

    assert words.fetch_add(WORD, 2**64 - 1, soon()) == 0
    assert words.fetch_add(WORD, 2, soon()) == 2**64 - 1
    assert mapped.words[WORD // 8] == 1


def test_compare_swap_stores_only_what_is_expected(mapped):
    words = mapped.open()

    assert words.compare_swap(WORD, 1, 5, soon()) == 0
    assert mapped.words[WORD // 8] == 0
    assert words.compare_swap(WORD, 0, 5, soon()) == 0
    assert mapped.words[WORD // 8] == 5


def test_threads_of_two_processes_lose_no_addition(mapped):
    both = [mapped.open(), mapped.open()]

    def add(words: Words) -> None:
        for _ in range(200):
            words.fetch_add(WORD, 1, soon())

    threads = [threading.Thread(target=add, args=(words,)) for words in both * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert mapped.words[WORD // 8] == 800


def test_who_holds_a_word_costs_the_others_their_deadline_and_no_other_word(mapped):
    holder = Dying(mapped.words, os.open(mapped.path, os.O_RDWR))
    mapped.descriptors.append(holder._descriptor)
    holder.hold(WORD)
    times = iter(range(100))
    other = mapped.open(clock=lambda: float(next(times)), sleep=lambda seconds: None)

    with pytest.raises(Unavailable, match="another process"):
        other.fetch_add(WORD, 1, 5.0)
    assert mapped.words[WORD // 8] == 0
    assert other.fetch_add(WORD + 8, 1, 100.0) == 0

    holder.let_go(WORD)
    assert other.fetch_add(WORD, 1, 100.0) == 0


def test_a_holder_that_dies_frees_its_word(mapped):
    holder = Dying(mapped.words, os.open(mapped.path, os.O_RDWR))
    holder.hold(WORD)
    os.close(holder._descriptor)  # what the kernel does for it

    assert mapped.open().fetch_add(WORD, 1, soon()) == 0


def test_closing_ends_who_waits_for_a_word(mapped):
    """And nobody touches the descriptor any more, which may be another file's by then."""
    holder = Dying(mapped.words, os.open(mapped.path, os.O_RDWR))
    mapped.descriptors.append(holder._descriptor)
    holder.hold(WORD)
    waiting, problems = threading.Event(), []

    def sleep(seconds: float) -> None:
        waiting.set()
        threading.Event().wait(seconds)

    other = mapped.open(sleep=sleep)

    def wait() -> None:
        try:
            other.fetch_add(WORD, 1, soon(60))
        except Unavailable as error:
            problems.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(10)
    other.close()
    other.close()
    thread.join(10)

    assert [error.message for error in problems] == ["the region is closed"]
    with pytest.raises(Unavailable, match="closed"):
        other.compare_swap(WORD + 8, 0, 1, soon())


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_what_a_thread_of_its_parent_was_using(mapped):
    words = mapped.open()
    with words._mine:
        child = os.fork()
        if not child:
            signal.alarm(10)  # of what is inherited nothing but this would end it
            words.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert words.fetch_add(WORD, 1, soon()) == 0
