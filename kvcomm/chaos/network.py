"""``Network``: how bytes travel between the hosts of a simulation, and every way in which they do not.

Frames are made and read by the shipped codec, and the client's end of a connection is the shipped
``kvcomm.rpc.session.Session``: what counts as sent, what is repeated and what is ``outcome_unknown`` is
decided by the code under test.  Only the sockets are missing, and they are worse than real ones::

    flush ── each frame by itself ──► lost
                                      meets a cut: lost, or held and delivered after the heal
                                      delayed; overtaking others, if the weather says so
                                      doubled

* Only idempotent requests are doubled, as the shipped client repeats no others.  The second copy comes from a
  connection that nobody listens to, like a request that was repeated after its connection died.
* A process that dies resets its connections; the other ends hear of it unless they are cut off, and then find
  out by silence, or when a frame reaches a process that does not know their connection.
* A host whose process is down refuses connections; one that is paused accepts them and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from kvcomm.chaos.draw import Draw
from kvcomm.chaos.world import Host, Timer, World
from kvcomm.credentials import Credentials
from kvcomm.errors import Corrupt, TooLarge, Unauthenticated
from kvcomm.machine import ConnectionId, Origin
from kvcomm.rpc.session import KEY_VECTOR, Exchange, Identity, Session, lost_reason
from kvcomm.steps import Answer, Ask
from kvcomm.wire.frames import Frame, FrameReader, encode_frame
from kvcomm.wire.messages import PROTOCOL_VERSION, Hello, Message, Ping, Pong, Welcome

Reply = Callable[[Message], None]
Cut = tuple[str, str]
"""From, to."""

_GHOST = ConnectionId(0)
"""Of requests that were sent twice."""
RETRANSMIT_S = (0.2, 0.8)


class Server(Protocol):
    """The serving side of a process, as ``kvcomm.serve`` has it."""

    def received(self, origin: Origin, message: Message, reply: Reply) -> None: ...

    def closed(self, connection: ConnectionId) -> None: ...


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network does to frames.  Probabilities are per frame."""

    delay_s: tuple[float, float] = (0.0002, 0.004)
    loss: float = 0.0
    double: float = 0.0
    tail: float = 0.0
    """Frames that take up to ``tail_s`` longer."""
    tail_s: float = 0.5
    late: float = 0.5
    """Of the frames that meet a cut: those that are delivered after it healed, the others are lost."""
    overtaking: bool = False


class Network:
    """One network; ``credentials`` are the cluster's."""

    def __init__(self, world: World, weather: Weather, credentials: Credentials) -> None:
        self.world, self.weather, self.credentials = world, weather, credentials
        self.cuts: set[Cut] = set()
        self.slow: dict[str, float] = {}
        """Additional delay of everything that a host sends or gets, seconds."""
        self.frame_count = 0
        self.ghosts = count(1 << 32)
        """Numbers of doubled requests: two of one number would be taken for one."""
        self._draw: Draw = world.draw.fork("network")
        self._servers: dict[str, Server] = {}
        self._accepted: dict[ConnectionId, Accepted] = {}
        self._links: list[Link] = []
        self._last_connection = 0
        self._tenants: dict[str, bytes] = {}

    # -- servers

    def listen(self, host: Host, server: Server) -> None:
        self._servers[host.name] = server

    def host_ended(self, host: Host) -> None:
        """A process is gone, and all its connections with it."""
        self._servers.pop(host.name, None)
        for accepted in list(self._accepted.values()):
            if accepted.host is host:
                del self._accepted[accepted.number]
                self.carry(host.name, accepted.link.host.name, accepted.link.reset)
        for link in [link for link in self._links if link.host is host]:
            self.forget(link)

    def accept(self, link: Link) -> None:
        """A connection request arrives."""
        name = link.server_name
        server, host = self._servers.get(name), self.world.hosts[name]
        if server is None:
            self.carry(name, link.host.name, link.refused)
            return
        self._last_connection += 1
        accepted = Accepted(self, ConnectionId(self._last_connection), host, server, link)
        self._accepted[accepted.number] = accepted
        self.carry(name, link.host.name, lambda: link.connected(accepted.number))

    def deliver(self, link: Link, number: ConnectionId, data: bytes) -> None:
        """A frame of a client arrives at the server's host."""
        accepted = self._accepted.get(number)
        if accepted is None:
            self.carry(link.server_name, link.host.name, link.reset)
        else:
            accepted.host.soon(lambda: accepted.received(data))

    def drop(self, accepted: Accepted) -> None:
        """The server ends a connection."""
        if self._accepted.pop(accepted.number, None) is not None:
            accepted.server.closed(accepted.number)
            self.carry(accepted.host.name, accepted.link.host.name, accepted.link.reset)

    def tenant(self, token: str) -> bytes:
        """Raises ``Unauthenticated``."""
        if token not in self._tenants:
            self._tenants[token] = self.credentials.tenant_digest(self.credentials.tenant_of(token))
        return self._tenants[token]

    # -- links

    def remember(self, link: Link) -> None:
        self._links.append(link)

    def forget(self, link: Link) -> None:
        """The client's end is gone; the server's hears of it unless it is cut off."""
        if link in self._links:
            self._links.remove(link)
        if link.number is not None:
            self.hang_up(link.host.name, link.server_name, link.number)

    def hang_up(self, client: str, server: str, number: ConnectionId) -> None:
        self.carry(client, server, partial(self._hung_up, number))

    def reset(self, one: str, two: str) -> None:
        """The connections between two hosts die, and both ends know it."""
        for link in list(self._links):
            if {link.host.name, link.server_name} == {one, two}:
                link.reset()

    def _hung_up(self, number: ConnectionId) -> None:
        accepted = self._accepted.pop(number, None)
        if accepted is not None:
            accepted.host.soon(lambda: accepted.server.closed(number))

    # -- frames

    def carry(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Something small that is not a frame: it is delayed, or lost when it meets a cut."""

        def arrived() -> None:
            if not self.is_cut(source, target):
                arrive()

        self.world.after(self._delay_s(source, target), arrived)

    def send(self, source: str, target: str, after_s: float, arrive: Callable[[], None]) -> float:
        """A frame; arrives not before ``after_s`` (when the one before it did), and the time is returned."""
        self.frame_count += 1
        due = self.world.now + self._delay_s(source, target)
        if not self.weather.overtaking:
            due = max(due, after_s)
        if not self._draw.chance(self.weather.loss):
            self.world.after(due - self.world.now, lambda: self._arrive(source, target, arrive))
        return due

    def doubles(self) -> bool:
        return self._draw.chance(self.weather.double)

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts

    def _arrive(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        if not self.is_cut(source, target):
            arrive()
        elif self._draw.chance(self.weather.late):
            delay_s = self._draw.uniform(*RETRANSMIT_S)
            self.world.after(delay_s, lambda: self._retry(source, target, arrive))

    def _retry(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """Held back by a cut: goes on trying until it is through."""
        if not self.is_cut(source, target):
            arrive()
        else:
            delay_s = self._draw.uniform(*RETRANSMIT_S)
            self.world.after(delay_s, lambda: self._retry(source, target, arrive))

    def _delay_s(self, source: str, target: str) -> float:
        delay_s = self._draw.uniform(*self.weather.delay_s)
        if self._draw.chance(self.weather.tail):
            delay_s += self._draw.uniform(0.0, self.weather.tail_s)
        return delay_s + self.slow.get(source, 0.0) + self.slow.get(target, 0.0)


class Accepted:
    """The server's end of a connection: greets, then hands requests to the process."""

    def __init__(
        self, network: Network, number: ConnectionId, host: Host, server: Server, link: Link
    ) -> None:
        self.network, self.number, self.host, self.server, self.link = network, number, host, server, link
        self._reader = FrameReader()
        self._tenant: bytes | None = None
        self._caller = 0
        self._last_due = 0.0

    def received(self, data: bytes) -> None:
        try:
            frames = read(self._reader, data)
        except (Corrupt, TooLarge):
            self.network.drop(self)
            return
        for frame in frames:
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        message, number = frame.message, frame.request
        if self._tenant is None:
            self._greet(number, message)
        elif isinstance(message, Ping):
            self.reply(number, Pong())
        else:
            origin = Origin(self.number, number, self._tenant, self._caller)
            self.server.received(origin, message, lambda reply: self.reply(number, reply))
            if message.idempotent and self.network.doubles():
                ghost = Origin(_GHOST, next(self.network.ghosts), self._tenant, self._caller)
                delay_s = self.network.world.draw.uniform(0.0, 0.5)
                self.host.after(delay_s, lambda: self.server.received(ghost, message, _nobody))

    def _greet(self, number: int, message: Message) -> None:
        if not isinstance(message, Hello) or message.protocol != PROTOCOL_VERSION:
            self.network.drop(self)
            return
        assert message.key_vector == KEY_VECTOR
        try:
            self._tenant = self.network.tenant(message.token)
        except Unauthenticated:
            self.network.drop(self)
            return
        self._caller = message.caller
        name = self.host.name
        self.reply(number, Welcome(name, "shard", "sim", self.host.life, self._tenant, "", 0))

    def reply(self, number: int, message: Message) -> None:
        for piece in encode_frame(number, message):
            data = bytes(piece)
            self._last_due = self.network.send(
                self.host.name, self.link.host.name, self._last_due, partial(self._back, data)
            )

    def _back(self, data: bytes) -> None:
        self.link.soon(lambda: self.link.received(data))


class Link:
    """The client's end of a connection: connecting, greeting, open, ended; drives the shipped ``Session``."""

    def __init__(
        self,
        network: Network,
        host: Host,
        server_name: str,
        identity: Identity,
        connect_timeout_s: float,
        lost: Callable[[Link, Exception], None],
    ) -> None:
        self.network, self.host, self.server_name = network, host, server_name
        self.session = Session(identity)
        self.number: ConnectionId | None = None
        """Of the connection, once there is one."""
        self._lost = lost
        self._life = host.life
        self._ended = False
        self._last_due = 0.0
        self._timer = host.after(connect_timeout_s, lambda: self.end(TimeoutError("no welcome in time")))
        network.remember(self)
        network.carry(host.name, server_name, lambda: network.accept(self))

    def connected(self, number: ConnectionId) -> None:
        if self._ended or self.host.life != self._life:
            self.network.hang_up(self.host.name, self.server_name, number)
            return
        self.number = number
        self.soon(self.flush)

    def flush(self) -> None:
        """Hand what waits to the network, frame by frame."""
        outbox = self.session.outbox
        while outbox and self.number is not None and not self._ended:
            number, piece = self.number, bytes(outbox.gather()[0])
            outbox.taken(len(piece))
            self._last_due = self.network.send(
                self.host.name,
                self.server_name,
                self._last_due,
                partial(self.network.deliver, self, number, piece),
            )
            self.session.pump(self.host.clock())

    def received(self, data: bytes) -> None:
        if self._ended:
            return
        reader = self.session.reader
        now = self.host.clock()
        try:
            for begin, size in _fill(reader, data):
                reader.buffer()[:size] = data[begin : begin + size]
                self.session.received(size, now)
        except (Corrupt, TooLarge) as error:
            self.end(error)
            return
        if self.session.welcome is not None:
            self._timer.cancel()
        self.flush()

    def soon(self, action: Callable[[], None]) -> None:
        """Run in the process that made the connection, if it is still there."""
        if self.host.life == self._life:
            self.host.soon(action)

    def reset(self) -> None:
        self.soon(lambda: self.end(ConnectionResetError("connection reset")))

    def refused(self) -> None:
        self.soon(lambda: self.end(ConnectionRefusedError("connection refused")))

    def end(self, error: Exception) -> None:
        """Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        self.network.forget(self)
        self._lost(self, error)


class Request:
    """A started request."""

    __slots__ = ("exchange", "link", "then", "timer")

    def __init__(self, exchange: Exchange, then: Callable[[Answer], None] | None) -> None:
        self.exchange = exchange
        self.then = then
        self.timer: Timer | None = None
        self.link: Link | None = None
        exchange.done = self._finished

    def _finished(self, exchange: Exchange) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.then is not None:
            assert exchange.answer is not None
            self.then(exchange.answer)


class Peers:
    """Connections by address, of one process; the counterpart of ``kvcomm.rpc.asynchronous.AsyncPeers``.

    Addresses are ``tcp://HOST:1``.
    """

    def __init__(
        self, network: Network, host: Host, identity: Identity, *, connect_timeout_s: float = 1.0
    ) -> None:
        self.host = host
        self._network, self._identity, self._connect_timeout_s = network, identity, connect_timeout_s
        self._links: dict[str, Link] = {}

    def start(
        self, asks: Sequence[Ask], deadline: float, then: Callable[[Answer], None] | None = None
    ) -> list[Request]:
        """Start requests; ``then`` is called for each when it has an answer."""
        now = self.host.clock()
        requests: list[Request] = []
        touched: list[Link] = []
        for ask in asks:
            until = deadline if ask.timeout_s is None else min(deadline, now + ask.timeout_s)
            request = Request(Exchange(ask, until), then)
            requests.append(request)
            touched.append(self._enter(request.exchange))
            if request.exchange.answer is None:
                request.timer = self.host.after(until - now, self._expiry(request))
        for link in touched:
            link.flush()
        return requests

    def give_up(self, request: Request, reason: str) -> None:
        exchange = request.exchange
        if exchange.answer is None:
            self._links[exchange.ask.address].session.give_up(exchange, reason, self.host.clock())

    def _expiry(self, request: Request) -> Callable[[], None]:
        return lambda: self.give_up(request, "no answer in time")

    def _enter(self, exchange: Exchange) -> Link:
        address = exchange.ask.address
        link = self._links.get(address)
        if link is None:
            name = address.removeprefix("tcp://").removesuffix(":1")
            link = Link(self._network, self.host, name, self._identity, self._connect_timeout_s, self._lost)
            self._links[address] = link
        exchange.reused = link.session.welcome is not None
        link.session.start(exchange, self.host.clock())
        return link

    def _lost(self, link: Link, error: Exception) -> None:
        for address, known in list(self._links.items()):
            if known is link:
                del self._links[address]
        again: Link | None = None
        for exchange in link.session.lost():
            if exchange.may_retry():
                exchange.retried = True
                again = self._enter(exchange)
            else:
                exchange.fail(lost_reason(error), self.host.clock(), failure=link.session.refusal)
        if again is not None:
            again.flush()


def read(reader: FrameReader, data: bytes) -> list[Frame]:
    """Feed ``data``; the frames that it completed.  Raises ``Corrupt`` or ``TooLarge``."""
    frames: list[Frame] = []
    for begin, size in _fill(reader, data):
        reader.buffer()[:size] = data[begin : begin + size]
        frames += reader.advance(size)
    return frames


def _fill(reader: FrameReader, data: bytes) -> Iterable[tuple[int, int]]:
    """(begin, size) of the pieces that fit where the reader wants them, one after the other."""
    begin = 0
    while begin < len(data):
        size = min(len(reader.buffer()), len(data) - begin)
        yield begin, size
        begin += size


def _nobody(message: Message) -> None:
    """Where the replies to doubled requests go."""


# -- partitions


def halves(one: Sequence[str], other: Sequence[str]) -> set[Cut]:
    """Two sides that cannot talk."""
    return {pair for a in one for b in other for pair in ((a, b), (b, a))}


def isolate(name: str, everybody: Sequence[str]) -> set[Cut]:
    """One host that hears nobody and is heard by nobody."""
    return halves([name], [other for other in everybody if other != name])


def one_way(source: str, target: str) -> set[Cut]:
    """``target`` does not hear ``source``."""
    return {(source, target)}


def bridge(names: Sequence[str]) -> set[Cut]:
    """Two sides that only the one in the middle can talk to."""
    middle = len(names) // 2
    return halves(names[:middle], names[middle + 1 :])


def ring(names: Sequence[str]) -> set[Cut]:
    """Each talks to its neighbours only: every one sees a majority (of five), no two see the same."""
    count = len(names)
    return {
        (names[a], names[b])
        for a in range(count)
        for b in range(count)
        if a != b and min((a - b) % count, (b - a) % count) > 1
    }


def everybody_alone(names: Sequence[str]) -> set[Cut]:
    return {(a, b) for a in names for b in names if a != b}
