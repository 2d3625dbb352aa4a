"""``AsyncLease``: the asyncio face of a lease, and the task that renews it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from kvcomm.errors import KVCommError
from kvcomm.lease import LeaseLost
from kvcomm.leaseplane import LeasePlane
from kvcomm.leasing import CALL_S, WAIT_S, LeaseFace, log
from kvcomm.steps import Steps

T = TypeVar("T")


class AsyncLease(LeaseFace):
    """See :class:`Lease`; for coroutines of one event loop."""

    def __init__(
        self,
        plane: LeasePlane,
        name: str,
        ttl_s: float,
        run: Callable[[Steps[Any], float], Awaitable[Any]],
    ) -> None:
        super().__init__(plane, name, ttl_s)
        self._run = run
        self._claiming = asyncio.Lock()

    async def acquire(self, *, deadline_s: float = WAIT_S) -> int:
        """See :meth:`Lease.acquire`."""
        until = time.monotonic() + deadline_s
        return await self._claim(self._plane.acquire(self.name, self._tenure, until), deadline_s)

    async def renew(self, *, deadline_s: float = CALL_S) -> None:
        """See :meth:`Lease.renew`."""
        await self._claim(self._plane.renew(self.name, self._tenure), deadline_s)

    async def release(self, *, deadline_s: float = CALL_S) -> None:
        """See :meth:`Lease.release`."""
        await self._claim(self._plane.release(self.name, self._tenure), deadline_s)

    @asynccontextmanager
    async def held(
        self, *, deadline_s: float = WAIT_S, lost: Callable[[LeaseLost], None] | None = None
    ) -> AsyncIterator[AsyncLease]:
        """See :meth:`Lease.held`; a task renews, and calls ``lost``."""
        await self.acquire(deadline_s=deadline_s)
        renewer = asyncio.create_task(self._keep(lost), name=f"lease {self.name}")
        try:
            yield self
            self.check()
        finally:
            renewer.cancel()
            await asyncio.gather(renewer, return_exceptions=True)
            with suppress(KVCommError):  # it runs out by itself
                await self.release()

    async def _claim(self, steps: Generator[Any, Any, T], deadline_s: float) -> T:
        async with self._claiming:
            result: T = await self._run(steps, deadline_s)
        return result

    async def _keep(self, lost: Callable[[LeaseLost], None] | None) -> None:
        try:
            while True:
                await asyncio.sleep(await self._renew_if_due())
        except LeaseLost as error:
            if lost is not None:
                lost(error)

    async def _renew_if_due(self) -> float:
        self.check()
        if self.renewal_due_s() <= 0:
            try:
                await self.renew(deadline_s=self.renewal_timeout_s())
            except LeaseLost:
                raise
            except KVCommError as error:
                log.warning("lease %s: a renewal failed: %s", self.name, error)
            except ValueError as error:
                raise LeaseLost(f"the lease cannot be renewed: {error}") from error
        self.check()
        return self.renewal_due_s()
