"""Channel arguments of clients and servers."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 256 << 20
"""A packed micro-batch has about 21 bytes per slot, so this is far above any real message and still
bounds memory.
"""

AUTHORIZATION: Final = "authorization"

_COMMON: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_COMMON,
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

CLIENT_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_COMMON,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    (
        "grpc.enable_http_proxy",
        0,
    ),  # peers are inside the job; a proxy of the environment must not see them
    ("grpc.use_local_subchannel_pool", 1),
)
