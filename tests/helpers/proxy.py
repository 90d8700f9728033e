"""A network that can fail, between a client and a server: bytes pass, connections are refused, or all goes silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from enum import Enum


class Network(Enum):
    """What becomes of connections."""

    UP = "bytes pass"
    DOWN = "connections are closed at once"
    SILENT = "nothing passes and nothing is said"


class Proxy:
    """Passes a port on to `behind`. `attempts` counts the connections that were tried."""

    def __init__(self, behind: str) -> None:
        self._host, _, self._port = behind.rpartition(":")
        self._connections: set[asyncio.Task[None]] = set()
        self._audible = asyncio.Event()
        self._audible.set()
        self.network = Network.UP
        self.attempts = 0
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def turn(self, network: Network) -> None:
        """Let the network be so from now on; connections end with it where it goes down."""
        self.network = network
        if network is Network.SILENT:
            self._audible.clear()
        else:
            self._audible.set()
        if network is Network.DOWN:
            self._end()

    async def stop(self) -> None:
        self._server.close()
        self._end()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _end(self) -> None:
        for task in self._connections:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts += 1
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._connections.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await task
        self._connections.discard(task)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._audible.wait()
        if self.network is Network.DOWN:
            return
        back_reader, back_writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            await asyncio.gather(self._pump(reader, back_writer), self._pump(back_reader, writer))
        finally:
            back_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            await self._audible.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def passing_to(address: str) -> AsyncIterator[Proxy]:
    """Pass a new port on to an address until the block ends."""
    proxy = Proxy(address)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
