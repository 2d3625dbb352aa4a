"""A process of another agent: takes over what it is told to, in a new client and a new engine each time, and
goes on greedily.  One JSON line in, one out.

Also what both processes are made of: the same tiny model from the same seed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcomm import connect
from kvcomm.client import Client
from kvcomm.engines.transformers.identity import namespace_of
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import KVCommError
from kvcomm.streams.archive import SpanLost
from kvcomm.streams.session import Session
from kvcomm.streams.sharing import Missing
from tests.models import tiny_model

MAKER, STREAM = "maker", "main"


def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return tiny_model("qwen3", seed=11)


def engine_for(kv: Client, network: PreTrainedModel) -> StreamEngine:
    return StreamEngine(network, 64, kv.bind(namespace_of(network, block_tokens=16)))


def greedy(engine: StreamEngine, session: Session, count: int) -> tuple[list[int], list[float]]:
    """``count`` tokens from the pending one on; the last one is pending then."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(count):
        assert session.pending is not None
        (logits,) = engine.feed([(session, [session.pending])])
        scores = torch.log_softmax(logits.double(), -1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores[tokens[-1]]))
        session.sampled(tokens[-1])
    return tokens, logprobs


def adopt(kv: Client, network: PreTrainedModel, order: dict[str, Any]) -> dict[str, Any]:
    engine = engine_for(kv, network)
    try:
        session = kv.agent("taker").stream_of(MAKER, order["stream"]).adopt(engine)
    except KVCommError as error:
        return {"refused": error.code, "message": error.message}
    if isinstance(session, Missing):
        return {"missing": list(session.rows)}
    fetched = counted(kv)
    answer: dict[str, Any] = {"fetched": fetched, "rows": session.next_row}
    answer["tokens"], answer["logprobs"] = greedy(engine, session, order["count"])
    if order.get("publish"):
        published = kv.agent("taker").stream(order["publish"]).publish(session, engine).published
        answer["published"] = [published.stored, published.present, published.failed]
    if order.get("restore"):
        (span,) = session.archive
        back = kv.archive(engine, bytes_max=0).bring_back(session, span)
        if isinstance(back, SpanLost):
            return answer | {"missing": list(back.missing_rows)}
        answer["restored"] = greedy(engine, session, order["count"])
    session.check()
    return answer


def counted(kv: Client) -> dict[str, float]:
    """Blocks by the tier that served them."""
    numbers = kv.metrics()
    return {tier: numbers[f'kvcomm_fetch_blocks_total{{tier="{tier}"}}'] for tier in ("l1", "l2", "l3")}


def main(config: str, instance: str) -> None:
    network = model()
    say("ready")
    for line in sys.stdin:
        with connect(config, instance=instance) as kv:
            say(adopt(kv, network, json.loads(line)))


def say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
