"""The control wire: ``ControlServer`` answers gRPC for one node, ``ControlClient`` asks one.

The only module that knows gRPC.  It translates: messages (``kvcomm.wire.control_codec``), the credential in
a call's metadata to a :class:`Caller`, ``KVCommError`` to a status and, on the other side, back.  What a node
does is its role's, behind :class:`ControlBackend`.

Nodes and operators' tools load gRPC, agents never do: a call costs 0.5 ms against 0.05 on the data wire.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

# gRPC reads these when it is imported.  By default it tells the terminal of every peer's orderly goodbye, and
# it guards against forks without exec, which nobody here does.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvcomm.block import BlockKey
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import (
    KVCommError,
    OutcomeUnknown,
    Refused,
    TooLarge,
    Unauthenticated,
    Unavailable,
    failure_to_error,
)
from kvcomm.namespace import TenantDigest
from kvcomm.wire import control_codec as codec
from kvcomm.wire import control_pb2 as pb
from kvcomm.wire import control_pb2_grpc
from kvcomm.wire.control_codec import NodeStatus
from kvcomm.wire.messages import BlockItem, RecordStates, RecordVersion, RecordWrite, RingMap

MESSAGE_BYTES_MAX = 32 << 20
"""Largest message either side accepts."""
BLOCK_BYTES_MAX = MESSAGE_BYTES_MAX - 4096
"""Largest copy that is answered; a larger one goes over the data wire."""

_LIMITS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]

CHANNEL_OPTIONS = [
    # With gRPC's defaults a channel needs 23 to 25 s to come back after a network partition of 30 s (TCP
    # back-off); with these about 1 s.  A dead peer is noticed within 2 s, also while nothing is being asked.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 300),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),  # nodes talk to each other directly, whatever the environment says
    *_LIMITS,
]

SERVER_OPTIONS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # our own clients' pings are no abuse
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two nodes on one port would each get half of the calls
    *_LIMITS,
]

CONCURRENT_CALLS_MAX = 256
"""Watchers included; further calls are refused at once."""
CALL_TIMEOUT_S_MAX = 30.0
"""How long the server works on a call whose client named no deadline, or a later one."""
TIMEOUT_S = 2.0
"""A client's patience where it does not say."""

_SERVICE = "kvcomm.v1.Control"
_HEALTH = "grpc.health.v1.Health"
_CODE = "kvcomm-code"
_INVALID = "invalid"
"""The one code beside those of ``kvcomm.errors``: the request was the caller's mistake."""
_DETAIL = "kvcomm-detail-bin"
_DETAIL_BYTES_MAX = 4096
"""Metadata is bounded to 8 KiB; a caller that needs a longer detail (a new ring) asks for it."""

_STATUS_OF_CODE = {
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "stale_epoch": grpc.StatusCode.FAILED_PRECONDITION,
    "conflict": grpc.StatusCode.ABORTED,
    "outcome_unknown": grpc.StatusCode.DEADLINE_EXCEEDED,
    "partly_done": grpc.StatusCode.DEADLINE_EXCEEDED,
    "corrupt": grpc.StatusCode.DATA_LOSS,
    "refused": grpc.StatusCode.FAILED_PRECONDITION,
    "pool_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "rejected": grpc.StatusCode.FAILED_PRECONDITION,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    _INVALID: grpc.StatusCode.INVALID_ARGUMENT,
}
"""Any other code is ``INTERNAL``."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the credential proves."""

    tenant: str
    digest: TenantDigest

    @property
    def is_node(self) -> bool:
        """Whether this is one of the cluster's own processes."""
        return self.tenant == NODE_TENANT


class ControlBackend(Protocol):
    """What a role does with control calls, in its event loop.  Failures are ``KVCommError``.

    ``timeout_s`` is what is left of the caller's patience; the server gives up on the call then.
    """

    def status(self) -> NodeStatus: ...

    def ring(self) -> RingMap | None: ...

    async def set_ring(self, ring: RingMap) -> None:
        """Work by this ring from now on.  ``Conflict`` if the one that stands is newer, or another of this
        epoch; nothing to do if it is the same."""
        ...

    async def list_blocks(self, caller: Caller, after: bytes, limit: int) -> list[BlockItem]: ...

    async def get_block(self, caller: Caller, key: BlockKey) -> bytes | None:
        """``header | payload``, or ``None``."""
        ...

    async def get_records(self, caller: Caller, keys: Sequence[bytes], timeout_s: float) -> RecordStates: ...

    async def put_records(
        self, caller: Caller, writes: Sequence[RecordWrite], timeout_s: float
    ) -> list[RecordVersion]: ...


class ControlServer:
    """Serves one node's backend, health and reflection, in the running event loop."""

    def __init__(self, backend: ControlBackend, credentials: Credentials) -> None:
        self._calls = _Calls(backend, credentials)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._credentials = credentials
        self._server: aio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; the bound ``host:port``.  Health says ``NOT_SERVING`` until :meth:`set_serving`.

        Raises:
            Refused: the address cannot be bound.
        """
        server = aio.server(
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX,
            interceptors=[_OnlyWithCredential(self._credentials)],
        )
        control_pb2_grpc.add_ControlServicer_to_server(self._calls, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((_SERVICE, _HEALTH, reflection.SERVICE_NAME), server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise Refused(f"the control wire cannot listen at {host}:{port}: in use, or not ours") from error
        await self.set_serving(False)
        await server.start()
        self._server = server
        return f"{host}:{bound}"

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told, for the whole node and for the service."""
        known = health_pb2.HealthCheckResponse
        status = known.SERVING if serving else known.NOT_SERVING
        for service in ("", _SERVICE):
            await self._health.set(service, status)

    def ring_changed(self) -> None:
        """The backend works by a newer ring, from wherever it came: tell the watchers."""
        self._calls.ring_changed()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop listening; calls under way have ``grace_s`` to end.  Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self._calls.close()
        await self._health.enter_graceful_shutdown()
        await server.stop(grace_s)


class _Calls:
    """The servicer: one coroutine a call."""

    def __init__(self, backend: ControlBackend, credentials: Credentials) -> None:
        self._backend = backend
        self._credentials = credentials
        self._changed = asyncio.Event()
        """Set and replaced whenever the ring changes; a watcher takes it first and looks then."""
        self._closing = False

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        async with _answering(context):
            return codec.status_to_pb(self._backend.status())

    async def GetRing(self, request: pb.GetRingRequest, context: Any) -> pb.Ring:
        async with _answering(context):
            return codec.ring_to_pb(self._backend.ring())

    async def WatchRing(self, request: pb.WatchRingRequest, context: Any) -> AsyncIterator[pb.Ring]:
        seen = request.after_epoch
        while not self._closing:
            changed = self._changed
            ring = self._backend.ring()
            if ring is not None and ring.epoch > seen:
                seen = ring.epoch
                yield codec.ring_to_pb(ring)
            else:
                await changed.wait()

    async def SetRing(self, request: pb.SetRingRequest, context: Any) -> pb.SetRingReply:
        async with _answering(context):
            if not self._caller(context).is_node:
                raise Refused("only the cluster's own processes may change its ring")
            ring = codec.ring_from_pb(request.ring)
            if ring is None:
                raise codec.RequestError("the request holds no ring (epoch 0)")
            await self._backend.set_ring(ring)
            self.ring_changed()
            return pb.SetRingReply(epoch=ring.epoch)

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksReply:
        async with _answering(context):
            after, limit = codec.list_range(request)
            return codec.items_to_pb(await self._backend.list_blocks(self._caller(context), after, limit))

    async def GetBlock(self, request: pb.GetBlockRequest, context: Any) -> pb.GetBlockReply:
        async with _answering(context):
            key = codec.block_key(request.key)
            copy = await self._backend.get_block(self._caller(context), key)
            if copy is not None and len(copy) > BLOCK_BYTES_MAX:
                raise TooLarge(
                    f"a copy of {len(copy)} bytes is over the control wire's {BLOCK_BYTES_MAX}; "
                    "fetch it over the data wire"
                )
            return pb.GetBlockReply(copy=copy)

    async def GetRecords(self, request: pb.GetRecordsRequest, context: Any) -> pb.GetRecordsReply:
        async with _answering(context) as timeout_s:
            keys = codec.record_keys(request.keys)
            states = await self._backend.get_records(self._caller(context), keys, timeout_s)
            return codec.records_to_pb(states)

    async def PutRecords(self, request: pb.PutRecordsRequest, context: Any) -> pb.PutRecordsReply:
        async with _answering(context, late=OutcomeUnknown) as timeout_s:
            writes = codec.writes_from_pb(request)
            versions = await self._backend.put_records(self._caller(context), writes, timeout_s)
            return codec.versions_to_pb(versions)

    def ring_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        self._closing = True
        self.ring_changed()

    def _caller(self, context: Any) -> Caller:
        tenant = self._credentials.tenant_of(_token(context.invocation_metadata()))
        return Caller(tenant, self._credentials.tenant_digest(tenant))


class _OnlyWithCredential(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without one of the cluster's tokens, reflection included; health is for everybody."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(f"/{_HEALTH}/"):
            return handler
        try:
            self._credentials.tenant_of(_token(handler_call_details.invocation_metadata))
        except Unauthenticated as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: KVCommError) -> Any:
    """A handler of the same shape that only says no."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]

    async def refuse(_request: Any, context: Any) -> None:
        await _abort(context, error.code, error.message, error.detail)

    return make(refuse, handler.request_deserializer, handler.response_serializer)


@asynccontextmanager
async def _answering(context: Any, late: type[KVCommError] = Unavailable) -> AsyncIterator[float]:
    """Bounds a call's time and tells its failures; yields the seconds it has."""
    remaining_s = context.time_remaining()
    timeout_s = CALL_TIMEOUT_S_MAX if remaining_s is None else min(remaining_s, CALL_TIMEOUT_S_MAX)
    try:
        async with asyncio.timeout(timeout_s):
            yield timeout_s
    except TimeoutError:
        await _abort(context, late.code, f"not done within {timeout_s:.3f} s")
    except codec.RequestError as error:
        await _abort(context, _INVALID, str(error))
    except KVCommError as error:
        await _abort(context, error.code, error.message, error.detail)


async def _abort(context: Any, code: str, message: str, detail: bytes = b"") -> NoReturn:
    trailing: list[tuple[str, str | bytes]] = [(_CODE, code)]
    if detail and len(detail) <= _DETAIL_BYTES_MAX:
        trailing.append((_DETAIL, detail))
    await context.abort(_STATUS_OF_CODE.get(code, grpc.StatusCode.INTERNAL), message, tuple(trailing))
    raise AssertionError("abort returned")


def _token(metadata: Any) -> str:
    """The credential in a call's metadata.

    Raises:
        Unauthenticated: there is none.
    """
    for name, value in metadata or ():
        if name == "authorization":
            scheme, _, token = str(value).partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    raise Unauthenticated("the call has no metadata `authorization: Bearer TOKEN`")


class ControlClient:
    """Asks one node; blocking, may be used by many threads.  In an event loop: ``asyncio.to_thread``.

    The channel reconnects by itself.  While there is no connection a call fails at once with ``Unavailable``.
    Every method takes ``timeout_s`` and raises ``KVCommError``, or ``ValueError`` for a request that no node
    could answer.
    """

    def __init__(self, address: str, token: str) -> None:
        """``address`` is ``host:port``.  Connecting is left to the first call."""
        self.address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._credential = (("authorization", f"Bearer {token}"),)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent; calls under way end with ``Unavailable``."""
        self._channel.close()

    def status(self, *, timeout_s: float = TIMEOUT_S) -> NodeStatus:
        return codec.status_from_pb(self._ask(self._control.Status, pb.StatusRequest(), timeout_s))

    def ring(self, *, timeout_s: float = TIMEOUT_S) -> RingMap | None:
        return codec.ring_from_pb(self._ask(self._control.GetRing, pb.GetRingRequest(), timeout_s))

    def set_ring(self, ring: RingMap, *, timeout_s: float = TIMEOUT_S) -> int:
        """Epoch that the node works by now.  Raises ``Conflict`` if it knows a newer ring."""
        request = pb.SetRingRequest(ring=codec.ring_to_pb(ring))
        return int(self._ask(self._control.SetRing, request, timeout_s).epoch)

    def watch_ring(self, after_epoch: int = 0, *, timeout_s: float) -> Iterator[RingMap]:
        """Each newer ring as it comes, for ``timeout_s`` in all, also across restarts of the node."""
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            request = pb.WatchRingRequest(after_epoch=after_epoch)
            stream = self._control.WatchRing(
                request, timeout=remaining_s, metadata=self._credential, wait_for_ready=True
            )
            try:
                for each in stream:
                    ring = codec.ring_from_pb(each)
                    assert ring is not None and ring.epoch > after_epoch, each
                    after_epoch = ring.epoch
                    yield ring
            except grpc.RpcError as error:
                failure = _failure(error, idempotent=True)
                if not isinstance(failure, Unavailable):
                    raise failure from error
            finally:
                stream.cancel()

    def list_blocks(
        self, after: bytes = b"", limit: int = codec.LIST_LIMIT_DEFAULT, *, timeout_s: float = TIMEOUT_S
    ) -> list[BlockItem]:
        request = pb.ListBlocksRequest(after=after, limit=limit)
        return codec.items_from_pb(self._ask(self._control.ListBlocks, request, timeout_s))

    def get_block(self, key: BlockKey, *, timeout_s: float = TIMEOUT_S) -> bytes | None:
        """``header | payload`` as the node sent it (``kvcomm.block.verify_copy`` checks it), or ``None``."""
        reply = self._ask(self._control.GetBlock, pb.GetBlockRequest(key=key), timeout_s)
        return bytes(reply.copy) if reply.HasField("copy") else None

    def get_records(self, keys: Sequence[bytes], *, timeout_s: float = TIMEOUT_S) -> RecordStates:
        request = pb.GetRecordsRequest(keys=keys)
        return codec.records_from_pb(self._ask(self._control.GetRecords, request, timeout_s))

    def put_records(
        self, writes: Sequence[RecordWrite], *, timeout_s: float = TIMEOUT_S
    ) -> list[RecordVersion]:
        """Raises ``OutcomeUnknown`` when the answer did not come: read before you write again."""
        request = codec.writes_to_pb(writes)
        reply = self._ask(self._control.PutRecords, request, timeout_s, idempotent=False)
        return codec.versions_from_pb(reply)

    def serving(self, *, timeout_s: float = TIMEOUT_S) -> bool:
        """What the node's health service says.  Raises ``Unavailable`` if there is no node."""
        reply = self._ask(self._health.Check, health_pb2.HealthCheckRequest(service=_SERVICE), timeout_s)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_serving(self, *, timeout_s: float) -> None:
        """Return as soon as the node is there and serves.  Raises ``Unavailable`` after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            stream = self._health.Watch(
                health_pb2.HealthCheckRequest(service=_SERVICE), timeout=remaining_s, wait_for_ready=True
            )
            try:
                if any(each.status == health_pb2.HealthCheckResponse.SERVING for each in stream):
                    return
            except grpc.RpcError as error:
                failure = _failure(error, idempotent=True)
                if not isinstance(failure, Unavailable):
                    raise failure from error
            finally:
                stream.cancel()
        raise Unavailable(f"the node at {self.address} does not serve after {timeout_s:g} s")

    def _ask(self, method: Any, request: Any, timeout_s: float, *, idempotent: bool = True) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._credential)
        except grpc.RpcError as error:
            raise _failure(error, idempotent=idempotent) from error


def _failure(error: grpc.RpcError, *, idempotent: bool) -> KVCommError | ValueError:
    """The node's own word where it said one; else what can be concluded from gRPC's status."""
    trailing: dict[str, Any] = {item.key: item.value for item in error.trailing_metadata() or ()}
    code, details = trailing.get(_CODE), error.details() or ""
    if code == _INVALID:
        return ValueError(details)
    if code is not None:
        return failure_to_error(str(code), details, bytes(trailing.get(_DETAIL, b"")))
    status = error.code()
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        # Nothing in the status tells a request that never left from one whose answer was lost.
        return Unavailable(details) if idempotent else OutcomeUnknown(details)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Refused(f"over a limit of the control wire: {details}")
    return KVCommError(f"{status.name}: {details}")
