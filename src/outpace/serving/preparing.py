"""Threads in which calls are prepared, beside the event loop.

Grammars, which may take seconds, have threads of their own, one for a tenant at a time: whoever sends many holds up
nobody else's prompts, and nobody else's grammars.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from outpace.serving.errors import ApiError
from outpace.serving.streaming import GONE
from outpace.serving.tenants import Tenant

T = TypeVar("T")
_GRAMMARS = ThreadPoolExecutor(4, "outpace-grammars")


async def prepared(tenant: Tenant, caller: Request, work: Callable[[], T], *, grammar: bool = False) -> T:
    """What ``work`` returns, called in another thread; ``grammar``: whether it may compile one.

    Raises ApiError where the caller has left while it waited for its turn: nobody wants the grammar any more.
    """
    if not grammar:
        return await asyncio.to_thread(work)
    await tenant.grammars.acquire()
    try:
        running = await _begun(caller, work)
    except BaseException:
        tenant.grammars.release()
        raise

    def ended(done: asyncio.Future[T]) -> None:
        tenant.grammars.release()
        if not done.cancelled():
            done.exception()  # which nobody may wait for any more

    running.add_done_callback(ended)
    # Where the caller's time is over the thread goes on: until it ends the tenant has no other.
    return await asyncio.shield(running)


async def _begun(caller: Request, work: Callable[[], T]) -> asyncio.Future[T]:
    if await caller.is_disconnected():
        raise ApiError("the caller has left", GONE)
    return asyncio.get_running_loop().run_in_executor(_GRAMMARS, work)
