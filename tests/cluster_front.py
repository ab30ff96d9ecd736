"""A front in a process of its own, for tests: prints where it listens, then what happens.

python -m tests.cluster_front HOST      ends with its standard input

joined NAME EPOCH ADDRESS
lost NAME REASON
tokens NAME COUNT             of a sequence that it starts on each
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flowkv_jax.cluster.membership import Membership, MembershipConfig
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.cluster.remote_node import RemoteNode
from flowkv_jax.cluster.roster import Member
from flowkv_jax.sequence import SequenceUpdate
from tests.cluster_fakes import SECRET, VERSION, RecordingListener, spec

NUM_TOKENS = 5


class PrintingListener(RecordingListener):
    def joined(self, port: RemoteNode, member: Member) -> None:
        super().joined(port, member)
        print("joined", port.name, port.epoch, member.peer.transfer_address, flush=True)
        port.start([spec(f"{port.name}/{port.epoch}", 3, 3 + NUM_TOKENS)])

    def lost(self, name: str, reason: str) -> None:
        super().lost(name, reason)
        print("lost", name, reason, flush=True)

    def deliver(self, name: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        super().deliver(name, updates)
        for update in updates:
            if update.finish_reason is not None:
                print("tokens", name, len(self.tokens(update.sequence_id)), flush=True)
        return ()


def main(host: str) -> None:
    membership = Membership(
        (host, 0),
        SECRET,
        PrintingListener(),
        version=VERSION,
        config=MembershipConfig(lease_s=2.0, heartbeat_s=0.1),
        tick_s=0.1,
    )
    print(*membership.address, flush=True)
    sys.stdin.read()
    membership.close()


if __name__ == "__main__":
    main(sys.argv[1])
