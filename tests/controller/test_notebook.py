"""Notes are made one at a time, and again until they are known."""

from __future__ import annotations

from itertools import count

from controller.notebook import AGAIN_S, ANSWER_S, Note, Notebook, Noted
from kvcomm.machine import Ticket


def test_the_plan_comes_before_the_map() -> None:
    notebook = Notebook(count(1))
    notebook.write("ring", b"ring")
    notebook.write("plan", b"plan")
    assert notebook.due(0.0) == [Note(Ticket(1), "plan", b"plan")]
    assert notebook.due(0.0) == [], "one at a time"
    assert notebook.noted(Noted(Ticket(1), "done"), 0.0) == Note(Ticket(1), "plan", b"plan")
    assert notebook.pending("ring") and not notebook.pending("plan")
    assert notebook.due(0.0) == [Note(Ticket(2), "ring", b"ring")]


def test_what_may_have_been_made_is_made_again_before_anything_else() -> None:
    notebook = Notebook(count(1))
    notebook.write("ring", b"one")
    notebook.due(0.0)
    notebook.write("ring", b"two")
    notebook.write("plan", b"plan")
    assert notebook.noted(Noted(Ticket(1), "unknown"), 1.0) is None
    assert notebook.deadline() == 1.0 + AGAIN_S
    assert notebook.due(1.0) == []
    assert notebook.due(1.0 + AGAIN_S) == [Note(Ticket(2), "ring", b"one")]
    assert notebook.noted(Noted(Ticket(1), "done"), 2.0) is None, "the answer to an older attempt"
    assert notebook.noted(Noted(Ticket(2), "done"), 2.0) is not None
    assert [note.value for note in notebook.due(2.0) if isinstance(note, Note)] == [b"plan"]


def test_a_note_without_an_answer_is_made_again() -> None:
    notebook = Notebook(count(1))
    notebook.write("ring", b"one")
    notebook.due(0.0)
    assert notebook.due(ANSWER_S - 0.1) == []
    assert notebook.due(ANSWER_S) == [Note(Ticket(2), "ring", b"one")]


def test_what_was_replaced_before_it_was_sent_is_never_sent() -> None:
    notebook = Notebook(count(1))
    notebook.write("ring", b"one")
    notebook.write("ring", b"two")
    assert notebook.due(0.0) == [Note(Ticket(1), "ring", b"two")]
    assert notebook.deadline() == ANSWER_S
