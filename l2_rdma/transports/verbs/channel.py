"""``VerbsChannel``: one region over one queue pair.

An operation is a :class:`Task` of one or more requests.  Requests wait in a queue until the send queue, the
completion queue and (for memory that is not registered) the arena have room; then as many as fit are posted
as one chain, with one doorbell.  A queue pair completes its requests in order, so only each
``SIGNAL_EVERY`` th and the last of a chain are signaled, and a completion is one of all that were posted
before it.

*Deadlines.*  What was not posted yet is dropped.  Of what was, a read into the arena harms nobody when it
arrives late; for all the rest, which could still touch the caller's memory or the peer's, the queue pair is
destroyed first.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcomm.block import Buffer
from kvcomm.errors import KVCommError, Refused, Unavailable
from l2_rdma.copying import address_of, copy_bytes
from l2_rdma.layout import WORD_BYTES, RegionHeader
from l2_rdma.transports.port import (
    Extent,
    Operation,
    TransportName,
    check_extent,
    check_read,
    check_word,
    outside,
)
from l2_rdma.transports.verbs.binding import explain
from l2_rdma.transports.verbs.bounce import Piece
from l2_rdma.transports.verbs.hub import TICKET_BITS, Hub
from l2_rdma.transports.verbs.pair import Endpoint, Pair
from l2_rdma.transports.verbs.registered import RegisteredMemory
from l2_rdma.transports.verbs.requests import Local

_log = logging.getLogger(__name__)

SEND_QUEUE_DEPTH = 128
SIGNAL_EVERY = 16
DRAIN_S_MAX = 0.02
"""How long a stopped queue pair may take to give back its requests before it is destroyed."""

Kind = Literal["read", "write", "fetch_add", "compare_swap"]


@dataclass(slots=True, eq=False)
class Task:
    """An operation under way."""

    operation: Operation
    kind: Kind
    requests_left: int = 0
    """That are not over."""
    error: KVCommError | None = None
    """The first of a request of it."""


@dataclass(slots=True, eq=False)
class Request:
    """One work request.  Its local memory is registered (``memory``) or a piece of the arena."""

    task: Task
    offset: int
    """In the peer's region."""
    length: int
    view: memoryview | None = None
    """What is copied to or from the piece; ``None`` = nothing is."""
    memory: RegisteredMemory | None = None
    address: int = 0
    """In ``memory``, as work requests name it."""
    piece: Piece | None = None
    compare_add: int = 0
    swap: int = 0


@dataclass(frozen=True, slots=True)
class Remote:
    """The region, as the peer's device knows it."""

    address: int
    key: int
    message_bytes_max: int
    atomics: bool


class VerbsChannel:
    """See ``port.Channel``.  Made by ``VerbsTransport.connect``."""

    transport: TransportName = "verbs"

    def __init__(self, hub: Hub, header: RegionHeader) -> None:
        self.header = header
        self.earliest_deadline = math.inf
        self._hub = hub
        self._broken: KVCommError | None = None
        self._waiting: deque[Request] = deque()
        self._posted: deque[tuple[int, Request]] = deque()
        self._ticket = 0
        self._remote: Remote | None = None
        binding = hub.device.binding
        self._binding = binding
        self._opcodes = {
            "read": binding.constants.IBV_WR_RDMA_READ,
            "write": binding.constants.IBV_WR_RDMA_WRITE,
            "fetch_add": binding.constants.IBV_WR_ATOMIC_FETCH_AND_ADD,
            "compare_swap": binding.constants.IBV_WR_ATOMIC_CMP_AND_SWP,
        }
        self._signaled = binding.constants.IBV_SEND_SIGNALED
        depth = min(SEND_QUEUE_DEPTH, hub.device.context.query_device().max_qp_wr)
        self._depth = depth
        self._pair = Pair(hub.device, hub.domain, hub.queue, depth=depth, rights=0)
        self._number = hub.enter(self)

    def endpoint(self) -> Endpoint:
        return self._pair.endpoint()

    def connect(self, peer: Endpoint, address: int, key: int) -> None:
        """Raises the binding's ``Error``."""
        report = self._hub.device.report
        size = min(peer.message_bytes_max, report.message_bytes_max)
        self._pair.connect(peer)
        self._remote = Remote(address, key, size, report.atomics != "none")

    @property
    def broken(self) -> KVCommError | None:
        return self._broken

    def read(self, extents: Sequence[Extent], into: Sequence[memoryview], deadline: float) -> list[Operation]:
        check_read(extents, into)
        with self._hub.lock:
            late = self._hub.clock() >= deadline
            operations = [
                self._begin("read", extent, view, deadline, late)
                for extent, view in zip(extents, into, strict=True)
            ]
            self._post_waiting()
        return operations

    def read_device(
        self, extents: Sequence[Extent], into: Sequence[tuple[RegisteredMemory, int]], deadline: float
    ) -> list[Operation]:
        """Like :meth:`read`, into memory that has no address here (``VerbsTransport.register_dmabuf``): each
        destination is its registration and an offset in it."""
        if len(extents) != len(into):
            raise ValueError(f"{len(extents)} extents and {len(into)} destinations")
        for extent, (memory, offset) in zip(extents, into, strict=True):
            if extent.offset < 0 or offset < 0 or offset + extent.length > memory.length:
                raise ValueError(f"{extent} does not fit at {offset} of {memory.length} bytes")
        with self._hub.lock:
            late = self._hub.clock() >= deadline
            operations = []
            for extent, (memory, offset) in zip(extents, into, strict=True):
                operation, error = self._admitted(extent, deadline, late)
                if error is None:
                    self._split_registered(Task(operation, "read"), extent, memory, memory.address + offset)
                operations.append(operation)
            self._post_waiting()
        return operations

    def write(self, extent: Extent, data: Buffer, deadline: float) -> Operation:
        view = memoryview(data)
        check_extent(extent, view.nbytes)
        if not view.c_contiguous:
            raise ValueError("what is written must be contiguous")
        with self._hub.lock:
            late = self._hub.clock() >= deadline
            operation = self._begin("write", extent, view, deadline, late)
            self._post_waiting()
        return operation

    def fetch_add(self, offset: int, amount: int, deadline: float) -> Operation:
        check_word(offset, amount)
        return self._atomic("fetch_add", offset, deadline, amount, 0)

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> Operation:
        check_word(offset, expected, desired)
        return self._atomic("compare_swap", offset, deadline, expected, desired)

    def close(self) -> None:
        with self._hub.lock:
            self.close_locked()

    def close_locked(self) -> None:
        """:meth:`close`, with the hub's lock held."""
        self.break_for(Unavailable("the channel is closed"))

    def completed(self, ticket: int, status: int) -> None:
        failed = status != self._binding.constants.IBV_WC_SUCCESS
        while self._posted and self._posted[0][0] <= ticket:
            number, request = self._posted.popleft()
            self._hub.places += 1
            if not failed or number < ticket:
                self._over(request, None)
            elif self._broken is not None:
                self._over(request, self._broken)
            else:
                error = _error_of(status, self._binding.constants, self.header.node)
                self._over(request, error)
                self.break_for(error)
                return

    def pump(self) -> None:
        while self._waiting and self._broken is None:
            batch = self._next_batch()
            if not batch:
                return
            self._post(batch)

    def expire(self, now: float) -> None:
        overdue = Unavailable(f"no answer from {self.header.node} in time")
        dropped = [each for each in self._waiting if now >= each.task.operation.deadline]
        if dropped:
            self._waiting = deque(each for each in self._waiting if now < each.task.operation.deadline)
        for request in dropped:
            self._over(request, overdue)
        for _, request in list(self._posted):
            operation = request.task.operation
            if now < operation.deadline or operation.done:
                continue
            if request.task.kind != "read" or request.memory is not None:
                self.break_for(overdue)
                return
            operation.fail(overdue)
            self._hub.ended()
        live = [each.task.operation for _, each in self._posted] + [
            each.task.operation for each in self._waiting
        ]
        self.earliest_deadline = min((each.deadline for each in live if not each.done), default=math.inf)

    def break_for(self, error: KVCommError) -> None:
        """Nothing works any more, and nothing arrives any more, when this returns.  With the lock held;
        idempotent."""
        hub = self._hub
        if self._broken is not None or hub.closed:
            self._broken = self._broken or error
            return
        self._broken = error if isinstance(error, Unavailable) else Unavailable(error.message)
        try:
            self._pair.stop()
            hub.drain(self._number, lambda: not self._posted, DRAIN_S_MAX)
        except self._binding.Error as failure:
            _log.debug("a queue pair could not be stopped, so it is destroyed at once: %s", failure)
        try:
            self._pair.close()
        except self._binding.Error as failure:
            _log.error("a queue pair of a device that is going away: %s", failure)
        hub.forget_completions(self._number)
        hub.places += len(self._posted)
        for request in [each for _, each in self._posted] + list(self._waiting):
            self._over(request, self._broken)
        self._posted.clear()
        self._waiting.clear()
        self.earliest_deadline = math.inf
        hub.leave(self._number)

    def _begin(self, kind: Kind, extent: Extent, view: memoryview, deadline: float, late: bool) -> Operation:
        """Cut an operation into requests, if it may begin at all."""
        operation, error = self._admitted(extent, deadline, late)
        if error is not None:
            return operation
        task = Task(operation, kind)
        memory, address = None, 0
        if not self._hub.memory.empty:
            address = address_of(view, writable=kind == "read")
            memory = self._hub.memory.find(address, view.nbytes, writable=kind == "read")
        if memory is not None:
            self._split_registered(task, extent, memory, address)
            return operation
        view = view.cast("B")
        size = self._hub.arena.piece_bytes_max
        for begin in range(0, extent.length, size):
            part = view[begin : begin + size]
            self._enqueue(Request(task, extent.offset + begin, part.nbytes, view=part))
        return operation

    def _split_registered(self, task: Task, extent: Extent, memory: RegisteredMemory, address: int) -> None:
        assert self._remote is not None
        size = self._remote.message_bytes_max
        for begin in range(0, extent.length, size):
            length = min(size, extent.length - begin)
            memory.use()
            self._enqueue(
                Request(task, extent.offset + begin, length, memory=memory, address=address + begin)
            )

    def _atomic(self, kind: Kind, offset: int, deadline: float, compare_add: int, swap: int) -> Operation:
        with self._hub.lock:
            late = self._hub.clock() >= deadline
            operation, error = self._admitted(Extent(offset, WORD_BYTES), deadline, late)
            assert self._remote is not None
            if error is None and not self._remote.atomics:
                operation.fail(Refused(f"the RDMA device {self._hub.device.report.device} has no atomics"))
            elif error is None:
                request = Request(
                    Task(operation, kind), offset, WORD_BYTES, compare_add=compare_add, swap=swap
                )
                self._enqueue(request)
                self._post_waiting()
        return operation

    def _admitted(self, extent: Extent, deadline: float, late: bool) -> tuple[Operation, KVCommError | None]:
        """A new operation; if it cannot begin it has failed already, for this reason."""
        if self._hub.closed and self._broken is None:
            raise ValueError("the transport is the parent process's: make one of your own")
        operation = Operation(deadline)
        error = self._broken or outside(self.header, *extent)
        if error is None and late:
            error = Unavailable("its time was over before it began")
        if error is not None:
            operation.fail(error)
        elif not extent.length:
            operation.complete()
            error = Unavailable("nothing is left to do")
        return operation, error

    def _enqueue(self, request: Request) -> None:
        request.task.requests_left += 1
        self._waiting.append(request)
        self.earliest_deadline = min(self.earliest_deadline, request.task.operation.deadline)

    def _post_waiting(self) -> None:
        """Post what was enqueued; whoever posts also looks after what has completed meanwhile, so that those
        who never wait do not fill the queues."""
        if self._posted:
            self._hub.turn()
        else:
            self.pump()
            self._hub.take()  # over a short wire it may be over already

    def _next_batch(self) -> list[Request]:
        """The requests for which there is room, with their local memory."""
        room = min(self._depth - len(self._posted), self._hub.places)
        batch: list[Request] = []
        while self._waiting and len(batch) < room:
            request = self._waiting[0]
            if request.memory is None:
                request.piece = self._hub.arena.take(request.length)
                if request.piece is None:
                    break
                request.address = self._hub.piece_address(request.piece.offset)
                if request.task.kind == "write" and request.view is not None:
                    copy_bytes(self._hub.piece_view(request.piece.offset, request.length), request.view)
            batch.append(self._waiting.popleft())
        return batch

    def _post(self, batch: Sequence[Request]) -> None:
        first_ticket = self._ticket + 1
        for request in batch:
            self._ticket += 1
            self._posted.append((self._ticket, request))
        self._hub.places -= len(batch)
        lent: list[tuple[Local, Any]] = []
        following: Any = None
        final = len(batch) - 1
        try:
            for index in range(final, -1, -1):
                last = index == final
                following = self._work_request(batch[index], last, following, lent)
                following.wr_id = self._number << TICKET_BITS | (first_ticket + index)
                signaled = last or index % SIGNAL_EVERY == SIGNAL_EVERY - 1
                following.send_flags = self._signaled if signaled else 0
            self._pair.post(following)
        except self._binding.Error as error:
            # How far it got is not known for sure; destroying the queue pair makes that irrelevant.
            self.break_for(Unavailable(f"the RDMA device takes no more work: {explain(error)}"))
        finally:
            self._hub.requests.give_back(lent)

    def _work_request(
        self, request: Request, last: bool, following: Any, lent: list[tuple[Local, Any]]
    ) -> Any:
        remote, kind = self._remote, request.task.kind
        assert remote is not None
        key = self._hub.piece_key if request.memory is None else request.memory.key
        local = Local(request.address, request.length, key, last)
        work = self._hub.requests.take(local, following)
        lent.append((local, work))
        work.opcode = self._opcodes[kind]
        address = remote.address + request.offset
        if kind in ("read", "write"):
            work.set_wr_rdma(remote.key, address)
        else:
            # The addend of a fetch-and-add travels as compare_add.
            work.set_wr_atomic(remote.key, address, request.compare_add, request.swap)
        return work

    def _over(self, request: Request, error: KVCommError | None) -> None:
        """Nothing uses the request's memory any more: its bytes are copied, its operation ends with its last
        request or its first error."""
        hub, task = self._hub, request.task
        value = 0
        if request.piece is not None:
            view = hub.piece_view(request.piece.offset, request.length)
            if error is None and not task.operation.done:
                if task.kind == "read" and request.view is not None:
                    copy_bytes(request.view, view)
                elif task.kind in ("fetch_add", "compare_swap"):
                    value = view.cast("Q")[0]
            hub.arena.give_back(request.piece)
        if request.memory is not None:
            request.memory.release()
        task.requests_left -= 1
        task.error = task.error or error
        if task.requests_left or task.operation.done:
            return
        if task.error is None:
            task.operation.complete(value)
        else:
            task.operation.fail(task.error)
        hub.ended()


def _error_of(status: int, constants: Any, node: str) -> KVCommError:
    """What the completion of a request that failed means to us."""
    if status in (constants.IBV_WC_REM_ACCESS_ERR, constants.IBV_WC_REM_INV_REQ_ERR):
        return Refused(f"{node} does not give this memory: its region is another now, or was never that long")
    if status in (constants.IBV_WC_RETRY_EXC_ERR, constants.IBV_WC_RNR_RETRY_EXC_ERR):
        return Unavailable(f"the RDMA device of {node} does not answer")
    if status == constants.IBV_WC_WR_FLUSH_ERR:
        return Unavailable(f"the connection to {node} was given up")
    names = {value: name for name, value in vars(constants).items() if name.startswith("IBV_WC_")}
    return Unavailable(f"RDMA work for {node} failed: {names.get(status, 'status')} ({status})")
