"""A context that was compacted five times goes on in another process exactly as in its own."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch and transformers")
pytest.importorskip("transformers", reason="needs torch and transformers")

from kvcomm.client import Client
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import NamespaceError, Refused, Unavailable
from kvcomm.stateplane import record_name
from kvcomm.streams.context import StreamContext
from kvcomm.streams.events import Event
from kvcomm.streams.session import Session
from tests.system.adopting import MAKER, STREAM, engine_for, greedy, model
from tests.system.conftest import Cluster

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

COUNT = 64
CLOSE = 1e-4


@dataclass
class Taker:
    """The other process."""

    process: subprocess.Popen[str]

    def said(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process ended"
        return json.loads(line)

    def adopt(self, stream: str = STREAM, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"stream": stream, "count": COUNT, **order}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = self.said()
        return answer


@contextmanager
def taker(cluster: Cluster) -> Iterator[Taker]:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.adopting", str(cluster.config), cluster.instance.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
    )  # fmt: skip
    try:
        other = Taker(process)
        assert other.said() == "ready"
        yield other
    finally:
        process.kill()
        process.communicate()


def compacted(engine: StreamEngine) -> Session:
    """A prompt, then five cuts in a partial block each, one of which archives what it takes."""
    draw = random.Random(3)
    session = engine.session()
    (logits,) = engine.feed([(session, [draw.randrange(4, 512) for _ in range(90)])])
    session.protect(10)
    session.sampled(int(logits.argmax()))
    for cut in range(5):
        greedy(engine, session, 21)
        assert session.slot_count % 16, "rows of the partial block saw what is cut now"
        session.evict([(16, 48)] if cut % 2 else [(16, 32), (48, 64)], archive=cut == 3, reason="test")
    greedy(engine, session, 2)
    session.check()
    return session


def assert_same(answer: Any, tokens: list[int], logprobs: list[float]) -> None:
    assert answer[0] == tokens
    assert max(abs(mine - theirs) for mine, theirs in zip(logprobs, answer[1], strict=True)) < CLOSE


def publish_without_an_event(kv: Client, context: StreamContext) -> None:
    value = replace(context, events=context.events[:-1]).encode()
    kv.run(kv._operations.state().put([(record_name("stream", MAKER, "lossy"), value, None)]), 5.0)


def test_another_process_continues_after_five_cuts_through_l2_and_with_the_pool_killed_through_l3(
    cluster: Cluster, kv: Client
) -> None:
    engine = engine_for(kv, model())
    session = compacted(engine)
    (span,) = session.archive
    assert kv.archive(engine, bytes_max=0).put_away(session, span).moved
    shared = kv.agent(MAKER).stream(STREAM).publish(session, engine, policy="test")
    assert shared.complete and len(shared.context.events) == 5
    publish_without_an_event(kv, shared.context)
    spoiled = engine.fork(session, b"s" * 32)
    rows, blocks = session.next_row, len(session.table)
    tokens, logprobs = greedy(engine, session, COUNT)
    further = kv.agent(MAKER).stream("further").publish(session, engine).published
    assert further.stored == len(session.table) - blocks + 1, "what was there is not written again"
    assert isinstance(kv.archive(engine, bytes_max=0).bring_back(session, span), Event)
    restored = greedy(engine, session, COUNT)

    with taker(cluster) as other:
        first = other.adopt(restore=True, publish="sibling")
        assert (first["rows"], first["fetched"]) == (rows, {"l1": 0, "l2": blocks, "l3": 0})
        assert_same((first["tokens"], first["logprobs"]), tokens, logprobs)
        assert_same(first["restored"], *restored)
        assert first["published"] == [0, further.stored + further.present, 0], (
            "siblings of one lineage share what they computed after the cuts, in whatever process"
        )

        assert other.adopt("lossy")["refused"] == "corrupt", "a record whose last event is lost"

        (pool,) = [node for node in cluster.instance.nodes() if node.role == "pool"]
        cluster.restarted(cluster.kill(pool.node, signal.SIGKILL))
        second = other.adopt(restore=True)
        assert second["fetched"]["l3"] > 0 and second["fetched"]["l2"] == 0
        assert_same((second["tokens"], second["logprobs"]), tokens, logprobs)
        assert_same(second["restored"], *restored)

    spoiled.evict([(16, 32)])
    other_tokens, other_logprobs = greedy(engine, spoiled, COUNT)
    with pytest.raises(AssertionError):  # the comparison above can fail
        assert_same((other_tokens, other_logprobs), tokens, logprobs)


def test_no_other_tenant_sees_a_stream_or_any_of_its_blocks(cluster: Cluster, kv: Client) -> None:
    """Not the block before the first cut, which agents of one tenant share with anybody; not the others, even
    when their keys are known."""
    network = model()
    engine = engine_for(kv, network)
    session = engine.session()
    engine.feed([(session, list(range(4, 70)))])
    session.evict([(16, 32)])
    engine.feed([(session, list(range(4, 30)))])
    context = kv.agent(MAKER).stream("private").publish(session, engine).context
    ours = engine_for(kv, network)
    assert kv.adopt_prefix(ours.session(), ours, session.tokens) == 16
    with cluster.client(cluster.instance.credentials().token("intruder")) as other:
        stream = other.agent("x").stream_of(MAKER, "private")
        with pytest.raises(Unavailable, match="no stream"):
            stream.context()
        theirs = engine_for(other, network)
        with pytest.raises(NamespaceError, match="tenant"):
            stream.adopt(theirs, context=context)
        with pytest.raises(Refused, match="another tenant"):
            stream.adopt(engine, context=context)
        assert other.adopt_prefix(theirs.session(), theirs, session.tokens) == 0
        lineages = [block.lineage for block in context.verify(engine.namespace).blocks]
        found = other._operations.fetch_named(theirs.namespace, context.keys, lineages)
        assert not other.run(found, 5.0).blocks
        assert not any(other.run(other._operations.present(context.keys), 5.0))
        assert all(kv.run(kv._operations.present(context.keys), 5.0))
