"""How the client connects: every option of its channel, with the reason."""

from __future__ import annotations

import json
from typing import Final

from pagedkv.client.target import is_loopback_target

_IDEMPOTENT: Final = {
    "pagedkv.v1.KvCache": ("GetCacheInfo", "GetSequence", "ListSequences", "GetUsage", "Audit", "SwapOut", "SwapIn"),
    "pagedkv.v1.Generation": ("GetModelInfo", "Tokenize", "Detokenize"),
}
_RETRIES: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_FIRST_RECONNECT_MS: Final = 200
_LAST_RECONNECT_MS: Final = 1_000  # gRPC adds up to a fifth; its own limit is two minutes, however short the outage
_CONNECT_MS: Final = 5_000  # for one try where nobody answers; gRPC's own is 20 s
_SILENCE_MS: Final = 20_000  # the server allows a ping each 10 s


def channel_options(
    target: str, max_message_bytes: int, *, silence_ms: int = _SILENCE_MS
) -> list[tuple[str, int | str]]:
    """Return the options of a channel to `target`.

    A server that is back is found within 1.2 s, also under another address; a connection that says nothing while a
    call runs is asked for a sign of life after `silence_ms` and given up after as much again.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.service_config", json.dumps(_service_config())),
        ("grpc.enable_http_proxy", int(not is_loopback_target(target))),
        ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _LAST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),  # in spite of its name the time that a try may take
        ("grpc.dns_min_time_between_resolutions_ms", _LAST_RECONNECT_MS),
        ("grpc.use_local_subchannel_pool", 1),  # or a new client would inherit the wait of an old one
        ("grpc.keepalive_time_ms", silence_ms),
        ("grpc.http2.ping_timeout_ms", silence_ms),  # or 60 s, whatever grpc.keepalive_timeout_ms says
    ]


def _service_config() -> dict[str, object]:
    names = [{"service": service, "method": method} for service, methods in _IDEMPOTENT.items() for method in methods]
    return {"methodConfig": [{"name": names, "retryPolicy": _RETRIES}]}
