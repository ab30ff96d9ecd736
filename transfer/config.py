"""Settings of a transfer engine. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How a `TransferEngine` works.

    Attributes:
        workers: transfers that run at once in each direction; more wait their turn.
        inline_bytes: up to this size a transfer is one message there and one back, done by the
            threads that read the channel.
        chunk_bytes: grain of pipelines: what one side writes while the other reads.
        parallel_bytes: from this size on, a copy is shared by `copy_threads` threads.
        copy_threads: threads of one large copy; 0 for as many as the machine has cores, up to 4.
        streams: data connections of one TCP transfer.
        max_frame_bytes: longest control frame that is accepted.
        max_notification_bytes: longest payload that `notify` takes.
        max_connections: connections a listener holds; more are closed at once.
        handshake_timeout_s: a connection that has not proved itself by then is closed.
        heartbeat_s: silence after which a channel is probed.
        peer_timeout_s: silence after which the peer counts as lost.
        settle_timeout_s: how long a failed or cancelled transfer waits for the other side to say
            that it has stopped; after that the connection is closed.
        query_after_s: silence about a transfer after which the other side is asked for its state.
        max_finished: finished transfers whose outcome is remembered, for queries.
        urgent_readers: threads that read what peers say, which also copy small legs and call
            callbacks, run before ordinary ones, for engines on cores that compute; see `urgency`.
            The event log says where the system does not permit it.
        max_events: entries of the event log.
        storage_dir: shared folder of the storage backend; None for no such backend.
        storage_lease_s: age after which a file in the shared folder is an orphan.
    """

    workers: int = 8
    inline_bytes: int = 64 * KIB
    chunk_bytes: int = 2 * MIB
    parallel_bytes: int = 4 * MIB
    copy_threads: int = 0
    streams: int = 2
    max_frame_bytes: int = 16 * MIB
    max_notification_bytes: int = 1 * MIB
    max_connections: int = 256
    handshake_timeout_s: float = 5.0
    heartbeat_s: float = 2.0
    peer_timeout_s: float = 10.0
    settle_timeout_s: float = 5.0
    query_after_s: float = 2.0
    max_finished: int = 4096
    urgent_readers: bool = False
    max_events: int = 1024
    storage_dir: Path | None = None
    storage_lease_s: float = 3600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("storage_dir", "urgent_readers"):
                continue
            if value < 0 or (value == 0 and field.name not in ("copy_threads", "inline_bytes")):
                raise ValueError(f"{field.name}={value} must be above 0")
        if self.inline_bytes > self.max_frame_bytes // 2:
            raise ValueError(
                f"inline_bytes={self.inline_bytes} must fit a frame: at most half of "
                f"max_frame_bytes={self.max_frame_bytes}"
            )
        if self.max_notification_bytes > self.max_frame_bytes // 2:
            raise ValueError(
                f"max_notification_bytes={self.max_notification_bytes} must fit a frame: at most "
                f"half of max_frame_bytes={self.max_frame_bytes}"
            )
        if self.heartbeat_s >= self.peer_timeout_s:
            raise ValueError(
                f"heartbeat_s={self.heartbeat_s} must be below peer_timeout_s="
                f"{self.peer_timeout_s}, or an idle peer counts as lost"
            )
