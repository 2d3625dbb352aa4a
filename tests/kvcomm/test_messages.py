import tracemalloc

import msgspec
import pytest

from kvcomm.wire import messages
from kvcomm.wire.frames import FrameReader, encode_frame
from kvcomm.wire.messages import (
    ITEMS_MAX,
    MESSAGES,
    AgentTraffic,
    BlockCopies,
    BlockGet,
    BlockItem,
    BlockListed,
    BlockPut,
    BlockReserve,
    BlockReserved,
    Failure,
    Fetched,
    Grant,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HotKey,
    HotRecords,
    HotReport,
    HotView,
    KeyHeat,
    LeafRecords,
    Message,
    NodePlan,
    OrderAnswer,
    PlannedMove,
    RecordForget,
    RecordPut,
    RecordReplicate,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordVersions,
    RecordWrite,
    RingMap,
    RingNode,
    RingRange,
    RingTransition,
    ShardLoad,
    ShardMove,
    Sibling,
    SplitReport,
    StrongAccept,
    StrongChange,
    StrongListed,
    StrongOrder,
    StrongOutcome,
    StrongOutcomes,
    StrongPromised,
    StrongRegister,
    StrongState,
    TreeDigests,
    TreeGet,
    Want,
    WarmOrder,
    Welcome,
)

STATE = RecordState({"r1": 3, "r2": 1}, [Sibling("r1", 3, 1 << 60, b"value"), Sibling("r2", 1, 0, None)])
STRONG = StrongState(b"ballot", b"ballot", StrongRegister([b"version"], b"value"), True)
NODE = RingNode("n1", "tcp://h:1", "unix:///run/n1", "h:2", "rack-a", 2)
EXAMPLES: list[Message] = [
    Hello(1, "t:ab", (1 << 64) - 1, bytes(32)),
    Welcome("n", "pool", "i", 1, bytes(16), "/dev/shm/x", 9),
    Failure("stale_epoch", "text", b"\x00map"),
    BlockReserved([Grant("granted", 1 << 63, 4096, 7), Grant("present")]),
    BlockPut(3, [Want(b"k" * 32, 1000)]),
    BlockCopies([0, 5]),
    BlockListed([BlockItem(b"k", 1)]),
    RecordStates([STATE, None], True),
    RecordPut(1, [RecordWrite(b"k", None, {"r": 1}), RecordWrite(b"l", b"", {})]),
    RecordVersions([RecordVersion("r", 1, {"r": 1}, 2)]),
    RecordReplicate(1, [b"k"], [STATE]),
    RecordForget(1, [b"k"], [STATE]),
    TreeGet(1, "n", 2, [0, 255]),
    TreeDigests([0, (1 << 64) - 1]),
    LeafRecords(1, [b"k"], [(1 << 64) - 1]),
    RingMap(4, 3, 2, 1, 1, [NODE], [NODE]),
    RingMap(
        5, 3, 2, 1, 1, [NODE], [], [RingRange(0, (1 << 64) - 1, "n1")], RingTransition("copy", [NODE], [])
    ),
    Heartbeat(
        "n1",
        "shard",
        "rack-a",
        (1 << 64) - 1,
        3,
        "tcp://h:1",
        "",
        "h:2",
        5,
        load=ShardLoad(1.5),
        move=ShardMove(5),
        split=SplitReport(3.0, 1, 2, 1, 1, -1.0),
    ),
    HeartbeatAnswer("controller-0", 5, plan=[NodePlan("n1", "shard", "rack-a")]),
    HotReport(
        2.0,
        [KeyHeat(b"k" * 32, 12.5, 0.5)],
        [KeyHeat(b"state/n/k", 3.0)],
        [KeyHeat(b"t" * 16 + b"state/n/k", 2.0)],
        [AgentTraffic(7, "rack-a", [Fetched(9, 2, 4096, 0)], "planner")],
    ),
    HotRecords([b"t" * 16 + b"state/n/k"], 6.0),
    WarmOrder([b"k" * 32], 1 << 20),
    HotView("controller-0", [HotKey(b"k" * 32, 12.5, 60.0)], []),
    RecordStates([RecordState({"a": 1}, [])], False, [0]),
    OrderAnswer(3, [PlannedMove("n2 joins", 0.25, 10, 100, 1, 1000, 0.5)]),
    StrongChange(1, [StrongOrder(b"k", "cas", b"version", b"v"), StrongOrder(b"k", "delete")]),
    StrongOutcomes([StrongOutcome("", b"version", None), StrongOutcome("conflict", b"", b"v", "text")]),
    StrongPromised(True, STRONG, 1, {"a": 2}),
    StrongAccept(1, b"k", b"ballot", STRONG.register, b""),
    StrongListed({"a": 1}, RingMap(4, 3, 2, 1, 1, [NODE], [NODE]), [b"k"], [STRONG], b"k"),
]


def test_every_message_can_be_decoded() -> None:
    """A message that is missing from MESSAGES would be refused by every receiver."""
    assert set(MESSAGES) == set(Message.__subclasses__())
    assert len(MESSAGES) == len(set(MESSAGES))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    [piece] = encode_frame(9, message)
    reader = FrameReader()
    reader.buffer()[: len(piece)] = piece
    [frame] = reader.advance(len(piece))
    assert (frame.request, frame.message, frame.payload) == (9, message, [])


def test_a_list_that_is_too_long_is_refused_before_its_items_are_made() -> None:
    body = msgspec.msgpack.encode(BlockReserve([Want(b"", 0)] * (ITEMS_MAX + 1)))
    decoder = msgspec.msgpack.Decoder(BlockReserve)
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.ValidationError, match="length"):
            decoder.decode(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_no_list_or_map_of_a_message_is_without_a_bound() -> None:
    structs = [value for value in vars(messages).values() if _is_struct(value)]
    collections = [
        (cls.__name__, field.name, field.type)
        for cls in structs
        for field in msgspec.inspect.type_info(cls).fields  # type: ignore[attr-defined]
        if isinstance(field.type, msgspec.inspect.ListType | msgspec.inspect.DictType)
    ]
    assert len(collections) > 20
    assert [each for each in collections if not each[2].max_length] == []


def _is_struct(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, msgspec.Struct)


def test_messages_are_tagged_arrays_without_field_names() -> None:
    body = msgspec.msgpack.encode(BlockGet(1, [b"k"]))
    assert msgspec.msgpack.decode(body) == ["BlockGet", 1, [b"k"]]


def test_what_adds_up_must_not_be_repeated() -> None:
    """A retry is decided by this flag: a new message with an effect that adds up must say so."""
    assert [cls.__name__ for cls in MESSAGES if not cls.idempotent] == [
        "RecordPut",
        "StrongChange",
        "ChannelOpen",
        "HotReport",
    ]


def test_structs_inside_messages_are_arrays_too() -> None:
    inner = [
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and not issubclass(value, Message)
    ]
    assert inner
    assert [cls.__name__ for cls in inner if not cls.__struct_config__.array_like] == []
