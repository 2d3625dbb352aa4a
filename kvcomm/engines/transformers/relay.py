"""``Relay``: one conversation on several streams, one after the other: each begins with the text that a
policy keeps of the one before.

The arms that KV-streams are compared with: re-prefill, and summaries that the model writes.  See
``kvcomm.streams.policies.restarts``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm.engines.transformers.generating import PREFILL_ROWS, Stream
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import ConfigError
from kvcomm.streams.policies.restarts import Reprefill
from kvcomm.streams.restarter import Restarter
from kvcomm.streams.rollout import Rollout


class Relay:
    """::

        relay = Relay(engine, stream, Reprefill(WholeTurns(10, 5)))
        ...
        relay.move()                                            before each prompt
        prefill(engine, [(relay.stream, prompt)])
        generate(engine, [relay.stream], max_new_tokens)

    Args:
        stream: with a ``Markup``, and a policy of its own that cuts nothing.
        policy: says before which prompts the conversation moves.
        adopt: take over the blocks of what is kept as far as nothing was dropped before them (the system
            prompt); without it all is computed again.

    Raises:
        ConfigError: the stream knows of no messages, or cuts by itself.
    """

    def __init__(
        self, engine: StreamEngine, stream: Stream, policy: Reprefill, *, adopt: bool = False
    ) -> None:
        if stream.conversation is None:
            raise ConfigError("a stream moves between messages: give it a markup")
        if stream.compactor.policy.name != "full":
            raise ConfigError("a stream that moves is not cut as well: give it no policy")
        self.stream, self.adopt = stream, adopt
        self.rollouts: list[Rollout] = []
        """Of the streams that ended.  The one under way has its own."""
        self.computed_again = 0
        """Rows that were fed only because the conversation moved."""
        self._engine, self._name = engine, stream.recorder.name
        self._restarter = Restarter(stream.conversation, policy)

    def move(self, *, chunk_rows: int = PREFILL_ROWS) -> bool:
        """Begin a new stream if the policy says so; whether it did.

        Args:
            chunk_rows: most rows in one pass.

        Raises:
            ValueError: the answer is not finished.
            PoolFull: what is kept does not fit beside the stream, which stays as it was.
        """
        carry = self._restarter.at_admission()
        if carry is None:
            return False
        session = self._engine.session()
        try:
            fed = session.adopt_prefix(carry.tokens) if self.adopt else 0
            self.computed_again += len(carry.tokens) - fed
            for start in range(fed, len(carry.tokens), chunk_rows):
                self._engine.feed([(session, carry.tokens[start : start + chunk_rows])])
            restarter = self._restarter.moved(session, carry)
            stream = self.stream.successor(f"{self._name}/{len(self.rollouts) + 1}", restarter.conversation)
        except BaseException:
            session.close()
            raise
        self._engine.counts.reprefilled(len(carry.tokens) - fed)
        self.rollouts.append(self.stream.rollout())
        self.stream.close()
        self.stream, self._restarter = stream, restarter
        return True

    def all_rollouts(self) -> Sequence[Rollout]:
        """Of every stream so far, the one under way at the end."""
        return [*self.rollouts, self.stream.rollout()]
