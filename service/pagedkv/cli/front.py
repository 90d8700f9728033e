"""The two ports of a service: open before anything is fetched, loaded or compiled, and until the last call ended."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.address import address_text
from pagedkv.cli.options import ServeOptions
from pagedkv.metrics.http import MetricsServer
from pagedkv.rpc.listener import Listener
from pagedkv.rpc.server import ServerConfig, make_listener


@dataclass(slots=True)
class Front:
    """What clients and probes meet. Until a service is put behind it, it says that one is loading."""

    config: ServerConfig
    listener: Listener
    metrics_server: MetricsServer | None
    metrics_host: str

    @property
    def address(self) -> str:
        """Where the gRPC server listens, as a target for clients."""
        return self.listener.address

    @property
    def metrics_url(self) -> str | None:
        """Base URL of the metrics server, None if it is off."""
        server = self.metrics_server
        return None if server is None else f"http://{address_text(self.metrics_host, server.port)}"

    async def close(self) -> None:
        """Close both ports."""
        await self.listener.close()
        if self.metrics_server is not None:
            await self.metrics_server.stop()


async def open_front(options: ServeOptions) -> Front:
    """Listen on both ports. Raises InvalidArgument if one cannot be had; then none is open."""
    config = ServerConfig(host=options.host, port=options.port, insecure=options.insecure)
    listener = make_listener(config)
    await listener.start()
    front = Front(config, listener, None, options.metrics_host)
    if options.metrics_port is not None:
        try:
            front.metrics_server = MetricsServer(None, host=front.metrics_host, port=options.metrics_port)
            await front.metrics_server.start()
        except BaseException:
            await front.close()
            raise
    return front
