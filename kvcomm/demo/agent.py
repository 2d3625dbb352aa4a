"""One agent of the demo: a process that reads orders from standard input until it closes.

It holds the model and a client, and nothing else that the other agents could see: what it knows of them came
through KVCOMM.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from kvcomm.config import TRANSPORTS
from kvcomm.demo.messages import Order, Read, Ready, Reconnect, Reply, Row, Start, Trouble
from kvcomm.demo.model import DemoModel
from kvcomm.errors import KVCommError

if TYPE_CHECKING:
    from kvcomm.client import Client
    from kvcomm.engines.transformers import Generation, Session

TIERS = ("l1", "l2", "l3")
_DEADLINE_S = 30.0
"""For one fetch or publish: generous, since a slow demonstration is better than one that computes instead."""
_WARM_UP_TOKENS = 64
_ROOM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Alone:
    """What reading without sharing gives."""

    first_token_s: float
    generation: Generation


class Agent:
    """Model and client of one agent."""

    def __init__(self, start: Start) -> None:
        from kvcomm.engines.transformers import namespace_of

        self.name = start.agent
        self._instance = start.instance
        self._config = start.config
        folder = None if start.model_folder is None else Path(start.model_folder)
        self._model, self._tokenizer = DemoModel(start.model_label, folder).load()
        self._namespace = namespace_of(self._model, self._tokenizer)
        self._kv = self._connect()
        self._alone: dict[tuple[int, ...], Alone] = {}
        self._session(None).read(list(range(_WARM_UP_TOKENS)))

    def obey(self, order: Read | Reconnect) -> Reply:
        if isinstance(order, Reconnect):
            self._kv.close()
            self._kv = self._connect()
            return self.ready()
        return self._read(order)

    def ready(self) -> Ready:
        return Ready(self.name, self._namespace.block_tokens, self._namespace.block_bytes)

    def close(self) -> None:
        self._kv.close()

    def _read(self, order: Read) -> Row:
        refused_before, reads_before = self._refused_copies(), self._l2_reads()
        shared = self._context(order)
        tokens = shared + list(self._tokenizer(order.question).input_ids)
        session = self._session(self._kv)
        reading = session.read(tokens, room_tokens=order.new_tokens + _ROOM_TOKENS)
        generation = session.generate(order.new_tokens, stop_tokens=())
        if order.keep:
            session.publish()
            self._kv.agent(self.name, self._namespace).context(order.session).append(session.tokens)
        alone = (
            self._read_alone(tokens, order.new_tokens)
            if reading.fetched_tokens
            else self._alone.get(tuple(tokens))
        )
        return Row(
            agent=self.name,
            step=order.step,
            shared_tokens=len(shared),
            token_count=reading.token_count,
            fetched_tokens={tier: reading.token_count_by_source.get(tier, 0) for tier in TIERS},
            fetched_bytes=reading.fetched_bytes,
            prefilled_tokens=reading.prefilled_tokens,
            published_blocks=0 if reading.published is None else reading.published.stored,
            first_token_s=reading.time_to_first_token_s,
            fetch_s=reading.fetch_s,
            prefill_first_token_s=alone.first_token_s if alone else reading.time_to_first_token_s,
            tokens_equal=generation.tokens == alone.generation.tokens if alone else None,
            logprob_difference=_difference(generation, alone.generation) if alone else None,
            refused_copies=self._refused_copies() - refused_before,
            text=generation.text,
            trouble=reading.trouble,
            l2_reads={used: count - reads_before[used] for used, count in self._l2_reads().items()},
        )

    def _context(self, order: Read) -> list[int]:
        if order.follow:
            other = self._kv.agent(self.name, self._namespace).context_of(order.follow, order.session)
            return list(other.manifest().tokens)
        return list(self._tokenizer(order.text).input_ids[: order.text_tokens])

    def _read_alone(self, tokens: list[int], new_tokens: int) -> Alone:
        """The same without sharing; measured once for each context, it takes seconds."""
        known = self._alone.get(tuple(tokens))
        if known is None:
            session = self._session(None)
            reading = session.read(tokens, room_tokens=new_tokens)
            known = Alone(reading.time_to_first_token_s, session.generate(new_tokens, stop_tokens=()))
            self._alone[tuple(tokens)] = known
        return known

    def _session(self, kv: Client | None) -> Session:
        from kvcomm.engines.transformers import Session

        return Session(self._model, self._tokenizer, kv, self._namespace, deadline_s=_DEADLINE_S)

    def _connect(self) -> Client:
        from kvcomm.connect import connect

        return connect(self._config, instance=self._instance, embed=False)

    def _refused_copies(self) -> int:
        numbers = self._kv.metrics()
        return round(sum(numbers[f'kvcomm_copies_refused_total{{tier="{tier}"}}'] for tier in TIERS))

    def _l2_reads(self) -> dict[str, int]:
        numbers = self._kv.metrics()
        names = {used: f'kvcomm_transport_reads_total{{transport="{used}"}}' for used in TRANSPORTS}
        return {used: round(numbers[name]) for used, name in names.items()}


def main() -> None:
    """Obey until standard input closes."""
    replies = _claim_stdout()
    agent: Agent | None = None
    try:
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            try:
                if isinstance(order, Start):
                    agent = Agent(order)
                    reply: Reply = agent.ready()
                else:
                    assert agent is not None, "the first order is Start"
                    reply = agent.obey(order)
            except (KVCommError, ValueError) as error:
                reply = Trouble(f"{type(error).__name__}: {error}")
            replies.write(msgspec.json.encode(reply) + b"\n")
            replies.flush()
    finally:
        if agent is not None:
            agent.close()


def _claim_stdout() -> IO[bytes]:
    """Replies go to what was standard output; whatever a library prints goes to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _difference(a: Generation, b: Generation) -> float:
    """Over the tokens that both have in common from the start on, and the first that they have not."""
    pairs = list(zip(a.tokens, b.tokens, strict=True))
    common = next((at + 1 for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))
    return max(abs(x - y) for x, y in zip(a.logprobs[:common], b.logprobs[:common], strict=True))


if __name__ == "__main__":
    main()
