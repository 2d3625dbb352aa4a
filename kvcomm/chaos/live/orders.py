"""What a story orders an agent, and what it answers: one JSON document a line, on its standard streams."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from kvcomm.chaos.observed import Sample
from kvcomm.chaos.scenario import Load
from kvcomm.wire.messages import DropPeer, RecordState


class Order(msgspec.Struct, frozen=True, tag_field="order"):
    """Answered by exactly one :class:`Answer`."""


class Setup(Order, frozen=True, tag="setup"):
    """The first one.  Answered when the cluster has a ring."""

    node: str
    index: int
    """Of the host, from 0."""
    seeds: list[str]
    """Data-wire addresses of shards, the own host's first."""
    controllers: list[str]
    """Data-wire addresses of the controllers, the own host's first; empty = none are watched."""
    token: str
    node_token: str
    """Of the cluster's own nodes."""
    load: Load
    seed: int
    request_timeout_s: float
    connect_timeout_s: float
    ring_within_s: float
    history: str
    """Path of the file that gets the history, JSON lines."""
    samples: str
    """Path of the file that gets what was sampled of the cluster, JSON lines."""


class Begin(Order, frozen=True, tag="begin"):
    """Let the clients begin."""


class Phase(Order, frozen=True, tag="phase"):
    """Take new keys from now on."""

    phase: int


class Drop(Order, frozen=True, tag="drop"):
    """Do not hear, or not speak to, these nodes (see ``kvcomm.rpc.droptable``); replaces an earlier one."""

    peers: list[DropPeer]


class End(Order, frozen=True, tag="end"):
    """Let every call come to its end, then no more."""


class Look(Order, frozen=True, tag="look"):
    """Read these, as part of the history: what is to be seen at last."""

    eventual: list[str]
    strong: list[str]


class States(Order, frozen=True, tag="states"):
    """What shards have of these eventual records in their own stores, and who owns them; answered by
    :class:`Stored`."""

    eventual: list[str]
    strong: list[str]
    shards: dict[str, str]
    """Node name -> address."""
    timeout_s: float = 2.0
    """Of each question."""


class Save(Order, frozen=True, tag="save"):
    """Write the files."""


class Told(Order, frozen=True, tag="told"):
    """Send a message to a controller as the cluster's own, and say what it answered."""

    addresses: list[str]
    """The first that can be reached and leads, where that matters, counts."""
    name: str
    """Class of the message in ``kvcomm.wire.messages``."""
    fields: dict[str, Any]
    timeout_s: float


class Answer(msgspec.Struct, frozen=True, tag_field="answer"):
    pass


class Done(Answer, frozen=True, tag="done"):
    text: str = ""
    """The message that a controller answered, as JSON, or why it refused."""
    refused: bool = False


class Failed(Answer, frozen=True, tag="failed"):
    text: str


class Stored(Answer, frozen=True, tag="stored"):
    states: dict[str, dict[str, RecordState | None]]
    """By node and key; each has only what it owns."""
    owners: dict[str, list[str]]
    """By key, by the newest map of those that answered."""
    missing: dict[str, str]
    """Nodes that did not answer, and why."""
    quorums: tuple[int, int, int] = (3, 2, 2)
    """Replicas, write quorum, read quorum by that map."""


AnyOrder = Setup | Begin | Phase | Drop | End | Look | States | Save | Told
AnyAnswer = Done | Failed | Stored

T = TypeVar("T", AnyOrder, AnyAnswer)

_encoder = msgspec.json.Encoder()


def encode(document: AnyOrder | AnyAnswer | Sample) -> bytes:
    """One line."""
    return _encoder.encode(document) + b"\n"


def decode_order(line: bytes) -> AnyOrder:
    return msgspec.json.decode(line, type=AnyOrder)


def decode_answer(line: bytes) -> AnyAnswer:
    return msgspec.json.decode(line, type=AnyAnswer)
