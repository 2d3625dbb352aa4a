"""How a client finds its way into a pool's memory, and what it does when the pool or the wire misbehaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from kvcomm.wire.messages import (
    BlockAbort,
    BlockPublish,
    BlockPublished,
    BlockReserve,
    BlockReserved,
    ChannelOffer,
    ChannelOffers,
    Done,
    Failure,
    Grant,
    Welcome,
)
from l2_rdma.attachment import AttachOptions, Mapped, Unusable, Wired, attach, published_statuses, put_failed
from l2_rdma.choice import Measured
from l2_rdma.layout import RegionHeader
from l2_rdma.transports.known import Found
from l2_rdma.transports.port import Extent, Operation, Provider, TransportName
from l2_rdma.transports.shm import ShmProvider, ShmTransport
from l2_rdma.wires import Wires
from tests.l2_rdma.pools import PoolThread, pool_thread
from tests.l2_rdma.regions import key_of, layout_of, payload_of, region_header
from tests.l2_rdma.test_tier import DIGEST, LARGE, copy_of
from tests.peers import IDENTITY, Dialogue, dead_address, scripted, soon

QUICK = AttachOptions(prefault=False, request_timeout_s=0.5)


class Wire(ShmTransport):
    """A transport of any name that reaches memory as ``shm`` does, and can be told to fail."""

    def __init__(self, name: TransportName) -> None:
        super().__init__()
        self.name = name
        self.channels: list[Any] = []
        self.refusal: KVCommError | None = None
        self.fails: Callable[[Extent], KVCommError | None] = lambda extent: None

    def connect(self, offer: bytes, header: RegionHeader, ask: Any, deadline: float) -> Any:
        if self.refusal is not None:
            raise self.refusal
        channel = super().connect(offer, header, ask, deadline)
        channel.transport = self.name
        write = channel.write

        def guarded(extent: Extent, data: Any, deadline: float) -> Operation:
            error = self.fails(extent)
            if error is None:
                return write(extent, data, deadline)
            operation = Operation(deadline)
            operation.fail(error)
            return operation

        channel.write = guarded  # type: ignore[method-assign]
        self.channels.append(channel)
        return channel


class Offering(ShmProvider):
    writes_unseen = True

    def __init__(self, region: Any, name: TransportName) -> None:
        super().__init__(region)
        self.name = name


class Bench:
    """A pool that offers some wires, and a client that has some."""

    def __init__(self, pool: PoolThread, wires: Wires, ours: dict[TransportName, Wire]) -> None:
        self.pool, self.wires, self.ours = pool, wires, ours
        self.attached: list[Mapped | Wired] = []

    def attach(self, options: AttachOptions = QUICK) -> Mapped | Wired:
        self.attached.append(attach(self.pool.address, IDENTITY, self.wires, options))
        return self.attached[-1]

    def close(self) -> None:
        for attachment in self.attached:
            attachment.close()


@pytest.fixture
def make_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    with ExitStack() as stack:

        def make(
            names: Sequence[str] = ("verbs", "tcp"),
            *,
            offered: Sequence[TransportName] = ("verbs", "tcp"),
            running: Sequence[TransportName] = ("verbs", "tcp"),
        ) -> Bench:
            def providers(wanted: Sequence[str], region: Any, options: Any) -> Found[Provider]:
                found: dict[TransportName, Provider] = {name: Offering(region, name) for name in offered}
                return Found(found, {"cuda": "no GPU in this host"})

            ours = {name: Wire(name) for name in running}
            found: Any = Found(
                dict(ours), {name: "not here" for name in names if name not in ("shm", *running)}
            )
            monkeypatch.setattr("l2_rdma.pool.find_providers", providers)
            monkeypatch.setattr("l2_rdma.wires.find_transports", lambda wanted, options: found)
            pool = stack.enter_context(pool_thread(tmp_path))
            bench = Bench(pool, Wires(tuple(names)), ours)
            stack.callback(bench.close)
            return bench

        yield make


def speeds(monkeypatch: pytest.MonkeyPatch, **block_s: float | KVCommError) -> None:
    """What measuring says of each transport."""

    def measure(transport: Wire, channel: Any, deadline: float, **options: Any) -> Measured:
        said = block_s[transport.name]
        if isinstance(said, KVCommError):
            raise said
        return Measured(transport.name, said, 1e12)

    monkeypatch.setattr("l2_rdma.attachment.measure", measure)


# -- which way -----------------------------------------------------------------------------------------------


def test_the_cheapest_channel_is_kept_and_the_others_are_closed(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, verbs=1e-3, tcp=1e-5)
    bench = make_bench()
    attachment = bench.attach()

    assert attachment.transport == "tcp"
    assert attachment.refused.unusable == {}
    assert "slower" in attachment.refused.unused["verbs"]
    assert [channel.broken is None for channel in bench.ours["verbs"].channels] == [False]
    attachment.close()
    assert bench.ours["tcp"].channels[0].broken is not None


def test_the_order_of_the_configuration_decides_between_equals(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, verbs=1.1e-3, tcp=1e-3)
    bench = make_bench(("verbs", "tcp"))

    assert bench.attach().transport == "verbs"


def test_a_single_way_is_not_measured(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch)
    assert make_bench(offered=["tcp"]).attach().transport == "tcp"


class Hole(Wire):
    """Opens channels that carry nothing: what is read is never there."""

    def connect(self, offer: bytes, header: RegionHeader, ask: Any, deadline: float) -> Any:
        channel = super().connect(offer, header, ask, deadline)
        channel.read = lambda extents, into, deadline: [Operation(deadline) for _ in extents]
        return channel

    def wait(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            threading.Event().wait(max(0.0, operation.deadline - time.monotonic()))
            operation.fail(Unavailable("the pool did not answer in time"))


def test_a_wire_that_carries_nothing_leaves_time_for_the_next(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.wires.found().running["verbs"] = Hole("verbs")
    attachment = bench.attach(AttachOptions(prefault=False, attach_timeout_s=0.4))

    assert attachment.transport == "tcp"
    assert attachment.refused.unusable == {"verbs": "the pool did not answer in time"}


def test_a_single_wire_that_carries_nothing_is_not_used(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(offered=["verbs"])
    bench.wires.found().running["verbs"] = Hole("verbs")

    with pytest.raises(Unusable, match="verbs: the pool did not answer in time"):
        bench.attach(AttachOptions(prefault=False, attach_timeout_s=0.2))


def test_what_cannot_be_used_has_its_reason(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(("shm", "cuda", "verbs", "tcp"))
    bench.ours["verbs"].refusal = Refused("no GID that both sides can use")
    attachment = bench.attach()

    assert attachment.transport == "tcp"
    assert attachment.refused.unusable == {
        "shm": "the pool: it does not offer it",
        "cuda": "not here",
        "verbs": "no GID that both sides can use",
    }


def test_what_the_pool_refuses_is_told_in_its_words(make_bench: Callable[..., Bench]) -> None:
    attachment = make_bench(("cuda", "tcp"), running=["cuda", "tcp"]).attach()

    assert attachment.refused.unusable == {"cuda": "the pool: no GPU in this host"}


def test_a_channel_that_fails_when_it_is_measured_is_not_used(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds(monkeypatch, verbs=Unavailable("no answer in time"), tcp=1.0)
    attachment = make_bench().attach()

    assert attachment.transport == "tcp"
    assert attachment.refused.unusable == {"verbs": "no answer in time"}


def test_memory_of_this_host_is_mapped_and_nothing_else_is_tried(tmp_path: Path) -> None:
    with pool_thread(tmp_path, transports=("shm", "tcp")) as pool:
        wires = Wires(("tcp", "shm"))
        attachment = attach(pool.address, IDENTITY, wires, QUICK)
        assert isinstance(attachment, Mapped)
        assert wires._found is None
        assert attachment.refused.unusable == {} and "mapped" in attachment.refused.unused["tcp"]
        attachment.close()


def test_where_there_is_no_way_all_reasons_are_told(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(("shm", "verbs"))
    bench.ours["verbs"].refusal = Unavailable("unplugged")

    with pytest.raises(Unusable, match="shm: the pool: it does not offer it; verbs: unplugged") as raised:
        bench.attach()
    assert set(raised.value.refused) == {"shm", "verbs"}


# -- pools that lie ------------------------------------------------------------------------------------------


def greeting(*answers: Any, incarnation: int = 11) -> Callable[[Dialogue], None]:
    """A pool that greets, and then answers so."""

    def script(peer: Dialogue) -> None:
        welcome = Welcome("rogue", "pool", "test", incarnation, DIGEST, "", 0)
        peer.say(peer.hear().request, welcome)
        for answer in answers:
            peer.say(peer.hear().request, answer)
        with suppress(EOFError):
            peer.hear()

    return script


HEADER = region_header(layout_of(), tenant=DIGEST)


@pytest.mark.parametrize(
    ("answer", "incarnation", "error", "words"),
    [
        (ChannelOffers(b"", [], []), 11, Refused, "not|no memory"),
        (ChannelOffers(b"\0" * 1024, [], []), 11, Corrupt, "region"),
        (ChannelOffers(b"short", [], []), 11, Corrupt, "1024"),
        (ChannelOffers(HEADER.pack(), [], []), 12, Unavailable, "another life"),
        (ChannelOffers(region_header(layout_of()).pack(), [], []), 11, Unavailable, "another tenant"),
        (ChannelOffers(HEADER.pack(), [], []), 11, Unusable, "does not offer"),
        (Done(), 11, Refused, "no memory"),
        (Failure("refused", "not now"), 11, Refused, "not now"),
    ],
)
def test_offers_that_are_none(answer: Any, incarnation: int, error: type[KVCommError], words: str) -> None:
    with scripted(greeting(answer, incarnation=incarnation)) as address, pytest.raises(error, match=words):
        attach(address, IDENTITY, Wires(("shm",)), QUICK)


def test_a_pool_that_answers_nonsense_when_a_channel_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking(Wire):
        def connect(self, offer: bytes, header: RegionHeader, ask: Any, deadline: float) -> Any:
            return ask(b"let me in")

    found: Any = Found({"tcp": Asking("tcp")}, {})
    monkeypatch.setattr("l2_rdma.wires.find_transports", lambda wanted, options: found)
    offers = ChannelOffers(HEADER.pack(), [ChannelOffer("tcp", b"")], [])
    with scripted(greeting(offers, Done())) as address, pytest.raises(Unusable, match="answers Done"):
        attach(address, IDENTITY, Wires(("tcp",)), QUICK)


def test_a_pool_that_never_answers_costs_the_time_it_has() -> None:
    options = AttachOptions(attach_timeout_s=0.1)
    begun = time.monotonic()
    with scripted(greeting()) as address, pytest.raises(Unavailable):
        attach(address, IDENTITY, Wires(("shm",)), options)
    with pytest.raises(Unavailable):
        attach(dead_address(), IDENTITY, Wires(("shm",)), options)
    assert time.monotonic() - begun < 5


# -- writing through a channel -------------------------------------------------------------------------------


def wired(bench: Bench) -> Wired:
    attachment = bench.attach()
    assert isinstance(attachment, Wired)
    return attachment


def test_a_put_reserves_writes_and_publishes(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(offered=["tcp"])
    attachment = wired(bench)

    assert attachment.put([copy_of(1), copy_of(2), copy_of(1)], soon()) == ["stored", "stored", "pending"]
    assert attachment.put([copy_of(1)], soon()) == ["present"]
    assert attachment.put([copy_of(3, 1 << 17)], soon()) == ["too_large"]
    block = attachment.reader.read(key_of(2), soon())
    assert block is not None and block.payload == payload_of(2, LARGE)
    assert attachment.failure is None and attachment.alive(time.monotonic())
    attachment.close()


def test_what_could_not_be_written_is_given_back(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(offered=["tcp"])
    attachment = wired(bench)
    writes: list[Extent] = []

    def third_fails(extent: Extent) -> KVCommError | None:
        writes.append(extent)
        return Unavailable("no answer in time") if len(writes) == 3 else None

    bench.ours["tcp"].fails = third_fails
    assert attachment.put([copy_of(1), copy_of(2), copy_of(3)], soon()) == ["stored", "unavailable", "stored"]
    assert isinstance(attachment.failure, Unavailable)
    assert bench.pool.usage().reserved_bytes == 0, "the reservation was aborted"
    assert bench.pool.usage().block_count == 2
    attachment.close()


def test_a_pool_that_stands_still_is_silent(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(offered=["tcp"])
    attachment = wired(bench)
    go_on = threading.Event()
    bench.pool._loop.call_soon_threadsafe(go_on.wait, 10)
    try:
        begun = time.monotonic()
        assert attachment.put([copy_of(1)], soon()) == ["unavailable"]
        assert QUICK.request_timeout_s <= time.monotonic() - begun < 5
        assert attachment.silent and attachment.failure is not None
        assert not attachment.alive(time.monotonic())
    finally:
        go_on.set()
        attachment.close()


def test_a_put_beside_a_put_that_hangs_ends_by_its_own_time(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(offered=["tcp"])
    attachment = wired(bench)
    assert attachment._asking.acquire(timeout=1)
    try:
        assert attachment.put([copy_of(1)], time.monotonic() + 0.02) == ["unavailable"]
        assert attachment.failure is None, "the pool has done nothing wrong"
        assert attachment.alive(time.monotonic() + 1), "nobody looks at a connection that is in use"
        attachment.close()
        assert attachment._connection.alive(), "whoever is using it closes it"
    finally:
        attachment._asking.release()
    attachment._ask(BlockAbort([]), soon())
    assert not attachment._connection.alive()


class Told:
    """A connection that answers as it is told."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[Any]()

    def call(self, message: Any, deadline: float) -> Any:
        self.asked.append(message)

        class Frame:
            message = self.answers.pop(0)

        return Frame

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        return


@pytest.mark.parametrize("change", [{"offset": 0}, {"offset": 1 << 40}, {"generation": 1}])
def test_a_grant_that_does_not_fit_the_region_is_never_written_to(
    make_bench: Callable[..., Bench], change: dict[str, int]
) -> None:
    bench = make_bench(offered=["tcp"])
    attachment = wired(bench)
    header = attachment.reader.channel.header
    right = {"offset": header.layout.slots_offset, "generation": header.generation_base}
    grant = Grant("granted", 5, **(right | change))
    real, attachment._connection = attachment._connection, Told(BlockReserved([grant]), Done())  # type: ignore[assignment]
    written: list[Extent] = []

    def watched(extent: Extent) -> None:
        written.append(extent)

    bench.ours["tcp"].fails = watched

    assert attachment.put([copy_of(1)], soon()) == ["unavailable"]
    asked: Any = attachment._connection
    assert [type(message) for message in asked.asked] == [BlockReserve, BlockAbort]
    assert written == []
    real.close()


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([Failure("refused", "")], "refused"),
        ([Failure("unavailable", "")], "unavailable"),
        ([Done()], "refused"),
        ([BlockReserved([])], "refused"),
        ([BlockReserved([Grant("full")])], "full"),
    ],
)
def test_what_the_pool_says_becomes_a_status(
    make_bench: Callable[..., Bench], answers: list[Any], status: str
) -> None:
    attachment = wired(make_bench(offered=["tcp"]))
    real, attachment._connection = attachment._connection, Told(*answers)  # type: ignore[assignment]

    assert attachment.put([copy_of(1)], soon()) == [status]
    real.close()


def test_published_statuses_are_one_a_copy() -> None:
    assert published_statuses(BlockPublished(["published", "expired", "corrupt", "new"]), 4) == [
        "stored", "expired", "corrupt", "refused",
    ]  # fmt: skip
    assert published_statuses(BlockPublished(["published"]), 2) == ["refused"] * 2
    assert published_statuses(Failure("outcome_unknown", ""), 2) == ["unavailable"] * 2
    assert put_failed(BlockPublish([])) == "refused"
