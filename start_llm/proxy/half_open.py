"""Answer clients that close their side of a connection once they have sent their request.

uvicorn takes the end of what a client sends for the end of the client. Both look alike from here: the kernel
tells a difference only when something is sent, and of a long prompt there is nothing to send yet. But clients
of the proxy run on this machine, so it can be seen whether a process still has the other end.
"""

import asyncio

from start_llm.proxy.client_times import TimedProtocol
from start_llm.proxy.ports import is_connected

_LOOK_S = 0.2


class KeptHalfOpen(TimedProtocol):
    """The HTTP protocol, except for clients that have closed one side."""

    _leaving: asyncio.Task[None] | None = None

    def eof_received(self) -> bool:
        """Return True if the connection stays open, because a whole request waits for its answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or not self.client:
            return False
        cycle.keep_alive = False
        self._leaving = asyncio.get_running_loop().create_task(self._leave_with_client())
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._leaving:
            self._leaving.cancel()
        super().connection_lost(exc)

    async def _leave_with_client(self) -> None:
        while await asyncio.to_thread(is_connected, self.client[1], self.server[1]):
            await asyncio.sleep(_LOOK_S)
        self.transport.abort()
