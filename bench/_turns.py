"""Several engines on one device that take turns: `gpu_peers.py --in-turns`.

Processors of shared machines change their speed from one second to the next, by a factor of two for the same loop.
Of engines that are measured one after the other, the one that has the slow minute loses. Here all of them have
started, and one works while the others wait: each takes its turn at a phase before any takes the next phase, every
second time in the opposite order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from threading import Thread

Turn = Callable[[], AbstractAsyncContextManager[None]]

PAUSE_S = 0.3
"""Between two turns: copies of the last one may still be on their way."""


class Turnstile:
    """In the process that started the others. Whoever ends is not waited for any more."""

    def __init__(self, address: Path, names: Sequence[str]) -> None:
        # When nobody is waited for any more, those who say that they have ended are not let in either, and one too
        # many of them would be held up at the door.
        self._listener = Listener(str(address), backlog=len(names))
        self._names = list(names)
        Thread(target=self._serve, daemon=True).start()

    def ended(self, name: str) -> None:
        """This one has ended, perhaps before it came."""
        with suppress(OSError), Client(self._listener.address) as connection:
            connection.send(name)

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        there: dict[str, Connection] = {}
        while len(there) < len(self._names):
            name, connection = self._expect()
            there.setdefault(name, connection)
        order = [there[name] for name in self._names]
        while order:
            waiting = [each for each in order if _hears(each)]  # all of them have come
            for each in waiting:
                with suppress(OSError):  # it has gone: found out when it does not come again
                    each.send("go")
                    _hears(each)  # it is done
                    time.sleep(PAUSE_S)
            order = waiting[::-1]

    def _expect(self) -> tuple[str, Connection]:
        connection = self._listener.accept()
        return connection.recv(), connection


def _hears(connection: Connection) -> bool:
    """Wait for its next word. False if it has gone."""
    try:
        wait([connection])
        connection.recv()
    except (EOFError, OSError):
        return False
    return True


def turns(address: str, name: str) -> Turn:
    """In an engine's process: `async with turn():` for what must not happen beside others."""
    connection = Client(address)
    connection.send(name)

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        connection.send("here")
        await asyncio.to_thread(connection.recv)
        try:
            yield
        finally:
            connection.send("done")

    return turn
