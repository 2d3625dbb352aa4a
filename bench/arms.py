"""Arms: one text, generated under several ways to keep its context short, turn by turn in lockstep.

A **turn** is a message that is read (a user's, a tool's: one prefill) and one that is written (decoded token
by token).  Every arm sees the same tokens: what the first arm draws, or a script says, is forced on all, so
they differ only in what happens when ``live`` turns are in view and the next one is admitted:

* ``splice``: the oldest ``stride`` turns' blocks leave the view; nothing is computed.
* ``again``: the session is dropped, and a new one reads what is kept from its first token on.
* ``again, prompt kept``: the same, but the blocks of the system prompt are still there.
* ``never``: everything stays in view.

All arms run on the same engine with the same batch and the same chunks.  They take a turn each before anybody
takes the next one, and who goes first rotates: a busy moment of the machine meets all of them, and a race
that ends early has still covered the same turns in every arm.  Tokens are counted where they are handed to
the engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from kvcomm.streams.compactor import Compactor
from kvcomm.streams.policies.turns import WholeTurns

if TYPE_CHECKING:
    from kvcomm.streams.engine import Engine
    from kvcomm.streams.session import Session

Way = Literal["splice", "again", "again, prompt kept", "never"]
WAYS: tuple[Way, ...] = get_args(Way)
NAMES: dict[Way, str] = {
    "splice": "KV-streams",
    "again": "re-prefill",
    "again, prompt kept": "re-prefill, system prompt kept",
    "never": "full context",
}
CHUNK_TOKENS = 2_048
"""Most tokens of a stream in one forward pass."""
SEED = 5


@dataclass(frozen=True, slots=True)
class Text:
    """The shape of what is read and written, in tokens.  Messages end on block borders, so that no arm needs
    filler."""

    turns: int
    read: int
    written: int
    system: int = 64

    @property
    def turn_tokens(self) -> int:
        return self.read + self.written

    @property
    def rows(self) -> int:
        return self.system + self.turns * self.turn_tokens


@dataclass(frozen=True, slots=True)
class Arm:
    """``stride`` turns go when ``live`` of them are in view and another one begins."""

    way: Way
    live: int = 0
    stride: int = 0

    @property
    def name(self) -> str:
        return NAMES[self.way] + (f", {self.live}/{self.stride}" if self.live else "")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Of a turn, over all streams."""

    seconds: float
    tokens: int
    """Handed to the engine."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What one turn cost an arm.  Turn 0 is the system prompt."""

    rows: int
    """Of the text so far, a stream."""
    slots: int
    """In view at its end, a stream."""
    cut: Part | None
    """Until the shorter context can be written to; ``None`` = nothing was cut."""
    read: Part
    written: Part
    step_s: float
    """Median of its decode steps, drawing a token included; one step is a token of every stream."""
    held_tokens: int
    """Room for so many in the blocks that are not free, of all streams."""


@dataclass(slots=True)
class Run:
    """One arm's race."""

    arm: Arm
    turns: list[Turn] = field(default_factory=list)

    @property
    def prefill_s(self) -> float:
        """Reading, and reading again: cuts included."""
        return sum(turn.read.seconds + (turn.cut.seconds if turn.cut else 0.0) for turn in self.turns)

    @property
    def total_s(self) -> float:
        return self.prefill_s + sum(turn.written.seconds for turn in self.turns)

    @property
    def prefilled_tokens(self) -> int:
        return sum(turn.read.tokens + (turn.cut.tokens if turn.cut else 0) for turn in self.turns)

    @property
    def cuts(self) -> dict[int, float]:
        """Seconds by turn."""
        return {at: turn.cut.seconds for at, turn in enumerate(self.turns) if turn.cut}

    @property
    def held_tokens_max(self) -> int:
        return max((turn.held_tokens for turn in self.turns), default=0)


@dataclass(slots=True)
class Race:
    """All arms over one text."""

    text: Text
    streams: int
    runs: list[Run]

    def run_of(self, way: Way, live: int = 0, stride: int = 0) -> Run | None:
        """The first of this way, and of these numbers if they are given."""
        for run in self.runs:
            if run.arm.way == way and (not live or (run.arm.live, run.arm.stride) == (live, stride)):
                return run
        return None

    @property
    def turns_run(self) -> int:
        return min(len(run.turns) for run in self.runs) - 1


Draw = Callable[[Sequence[Any]], list[int]]
"""From logits (float32 ``[vocab]``, one a stream) to tokens; every arm pays for it at every step."""
Watch = Callable[[int, int, Sequence[Any], list[int]], None]
"""Is told turn, step, logits and the tokens that follow them."""


class Script:
    """What all streams read and write.  ``drawn`` is written by the first arm that comes to a step."""

    def __init__(self, text: Text, streams: int, vocab_size: int, *, forced: bool) -> None:
        draw = random.Random(SEED)

        def tokens(count: int) -> list[list[int]]:
            return [[draw.randrange(vocab_size) for _ in range(count)] for _ in range(streams)]

        self.system = tokens(text.system)
        self.read = [tokens(text.read) for _ in range(text.turns)]
        self.drawn: dict[tuple[int, int], list[int]] = {}
        """By turn and step, a token a stream."""
        if forced:
            for turn in range(text.turns):
                by_stream = tokens(text.written)
                for step in range(text.written):
                    self.drawn[turn, step] = [each[step] for each in by_stream]

    def next(self, turn: int, step: int, drawn: list[int]) -> list[int]:
        return self.drawn.setdefault((turn, step), drawn)


class Runner:
    """One arm on its way through the text."""

    def __init__(
        self,
        arm: Arm,
        text: Text,
        script: Script,
        engine: Engine,
        draw: Draw,
        *,
        settle: Callable[[], None] = lambda: None,
        reserve: Callable[[Sequence[Session]], None] = lambda sessions: None,
        refresh: Callable[[Sequence[Session]], None] = lambda sessions: None,
        watch: Watch = lambda turn, step, logits, tokens: None,
        chunk_tokens: int = CHUNK_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            settle: returns once the device has done what it was asked to.
            reserve: takes what memory the sessions will want of the engine, before anything is timed.
            refresh: does at once what the engine puts off from a cut until the next feed, so that the cut
                pays for it.
            clock: seconds; of the processor instead of the wall where only this thread computes and others
                want the machine, too.
        """
        self.arm, self.text, self.script, self.engine, self.draw = arm, text, script, engine, draw
        self.settle, self.reserve, self.refresh = settle, reserve, refresh
        self.watch, self.chunk_tokens = watch, chunk_tokens
        self.clock = clock
        self.run = Run(arm)
        self.sessions: list[Session] = []
        self.prompts: list[Session] = []
        """Hold the system prompt's blocks, where the arm keeps them."""
        self.compactors: list[Compactor] = []
        self.live = 0
        self._fed = 0

    def begin(self) -> None:
        """The system prompt."""
        self.sessions = [self.engine.session() for _ in self.script.system]
        self.reserve(self.sessions)
        self._fed, begun = 0, self.clock()
        self._read(self.script.system)
        if self.arm.way == "again, prompt kept":
            self.prompts = self.sessions
            self.sessions = self._from_prompts()
        read = Part(self._settled(begun), self._fed)
        for session in self.sessions:
            session.protect(self.text.system)
        if self.arm.way == "splice":
            policy = WholeTurns(self.arm.live, self.arm.stride)
            self.compactors = [Compactor(session, policy) for session in self.sessions]
        self._end_turn(0, None, read, Part(0.0, 0), 0.0)

    def take(self, turn: int) -> None:
        """One turn, ``begin`` before the first."""
        cut = self._admit()
        self._fed, begun = 0, self.clock()
        logits = self._read(self.script.read[turn])
        read = Part(self._settled(begun), self._fed)
        self._fed, steps, begun = 0, [], self.clock()
        for step in range(self.text.written):
            began = self.clock()
            tokens = self.script.next(turn, step, self.draw(logits))
            self.watch(turn, step, logits, tokens)
            logits = self._feed([[token] for token in tokens])
            steps.append(self.clock() - began)
        written = Part(self._settled(begun), self._fed)
        self.live += 1
        for session in self.sessions:
            session.end_turn(session.slot_count - self.text.turn_tokens)
        self._end_turn(turn + 1, cut, read, written, median(steps))

    def close(self) -> None:
        for session in (*self.sessions, *self.prompts):
            session.close()

    def _admit(self) -> Part | None:
        if self.arm.way == "never" or self.live < self.arm.live:
            return None
        self._fed, begun = 0, self.clock()
        if self.arm.way == "splice":
            self._splice()
        else:
            self._again()
        self.live -= self.arm.stride
        return Part(self._settled(begun), self._fed)

    def _splice(self) -> None:
        for compactor in self.compactors:
            assert compactor.at_admission(), "so many turns are in view"
        self.refresh(self.sessions)

    def _again(self) -> None:
        start, end = self._gone()
        kept = [session.tokens[:start] + session.tokens[end:] for session in self.sessions]
        for session in self.sessions:
            session.close()
        if self.arm.way == "again":
            self.sessions = [self.engine.session() for _ in kept]
        else:
            self.sessions = self._from_prompts()
            kept = [tokens[self.text.system :] for tokens in kept]
        self._read(kept)
        for session in self.sessions:
            session.protect(self.text.system)

    def _from_prompts(self) -> list[Session]:
        return [self.engine.fork(prompt, bytes(32)) for prompt in self.prompts]

    def _gone(self) -> tuple[int, int]:
        """Slots of what a cut takes; a session that reads again has as many tokens as slots."""
        return self.text.system, self.text.system + self.arm.stride * self.text.turn_tokens

    def _read(self, tokens: Sequence[Sequence[int]]) -> Sequence[Any]:
        logits: Sequence[Any] = ()
        for begin in range(0, len(tokens[0]), self.chunk_tokens):
            logits = self._feed([each[begin : begin + self.chunk_tokens] for each in tokens])
        return logits

    def _feed(self, tokens: Sequence[Sequence[int]]) -> Sequence[Any]:
        self._fed += sum(map(len, tokens))
        return self.engine.feed(list(zip(self.sessions, tokens, strict=True)))

    def _settled(self, begun: float) -> float:
        self.settle()
        return round(self.clock() - begun, 7)

    def _end_turn(self, number: int, cut: Part | None, read: Part, written: Part, step_s: float) -> None:
        pool = self.engine.pool
        rows = self.text.system + number * self.text.turn_tokens
        held = (pool.block_count - pool.free_count) * self.engine.namespace.block_tokens
        turn = Turn(rows, self.sessions[0].slot_count, cut, read, written, round(step_s, 7), held)
        self.run.turns.append(turn)


def race(
    runners: Sequence[Runner],
    *,
    leaders: int = 0,
    go_on: Callable[[int], bool] = lambda turn: True,
    close: bool = True,
) -> Iterator[Race]:
    """Lead all runners through their text, and give what there is after every turn.

    Args:
        leaders: so many of them always go first, in this order (1 = what the first one draws is the script).
        go_on: is asked before each turn; at the first ``False`` all stop there.
        close: let go of all memory at the end.
    """
    text, streams = runners[0].text, len(runners[0].script.system)
    found = Race(text, streams, [runner.run for runner in runners])
    for runner in runners:
        runner.begin()
    for turn in range(text.turns):
        if not go_on(turn):
            break
        rest = runners[leaders:]
        first = turn % max(1, len(rest))
        for runner in (*runners[:leaders], *rest[first:], *rest[:first]):
            runner.take(turn)
        yield found
    for runner in runners if close else ():
        runner.close()
