"""The life of transfers under random faults, cancels, deadlines and losses, with the fake backend.

Whatever happens: every transfer becomes final once, both sides agree, what completed has arrived,
what did not is not half pinned, and nothing of it is left.
"""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.transfer_peer import assert_moved, filled_pool, request
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.handle import TransferHandle
from transfer.lifecycle import TransferState
from transfer.testing import Arrivals, Fault, ManualClock, ScriptedBackend
from transfer.types import TransferRequest, Verification

BLOCKS = 24
IDS = list(range(BLOCKS))
CHECKED = Verification.CHECKSUM
FAILS = (Fault.OFFER_FAILS, Fault.SOURCE_FAILS, Fault.DESTINATION_FAILS)
HANGS = (Fault.SOURCE_HANGS, Fault.DESTINATION_HANGS)


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.arrivals = Arrivals()
        # Time that only ever jumps must not make the peer look silent, or slow to settle.
        config = TransferConfig(inline_bytes=4096, peer_timeout_s=1e9, settle_timeout_s=1e6)
        self.backends = [ScriptedBackend(name="nixl"), ScriptedBackend(name="tcp")]
        self.source = TransferEngine(config, backends=self.backends, clock=self.clock)
        twins = [ScriptedBackend(name=backend.name) for backend in self.backends]
        self.destination = TransferEngine(config, backends=twins, on_arrival=self.arrivals)
        self.a, self.b = filled_pool(BLOCKS, 1), filled_pool(BLOCKS, 2)
        self.source.register_pool("a", self.a)
        self.destination.register_pool("b", self.b)
        self.source.connect(self.destination.listen())
        self.open: dict[str, tuple[TransferHandle, TransferRequest]] = {}

    @rule(
        start=st.integers(0, BLOCKS - 6),
        to=st.integers(0, BLOCKS - 6),
        count=st.integers(1, 6),
        faults=st.tuples(st.sampled_from(Fault), st.sampled_from(Fault)),
        deadline_s=st.sampled_from([None, 5.0]),
        verification=st.sampled_from(Verification),
    )
    def submit(
        self,
        start: int,
        to: int,
        count: int,
        faults: tuple[Fault, Fault],
        deadline_s: float | None,
        verification: Verification,
    ) -> None:
        for backend, fault in zip(self.backends, faults, strict=True):
            backend.set_script([fault])
        req = request([(start, to, count)], deadline_s=deadline_s, verification=verification)
        handle = self.source.submit(req)
        failing = {*FAILS, *([Fault.CORRUPT_BYTE] if verification is CHECKED else [])}
        if faults[0] in HANGS or (faults[0] in failing and faults[1] in HANGS):
            self.open[handle.transfer] = (handle, req)
            # The script of the second backend is this transfer's until it gets there.
            while faults[0] in failing and self.backends[1].num_left and not handle.state.is_final:
                time.sleep(0.0005)
        else:
            self.finish(handle, req)

    def finish(self, handle: TransferHandle, req: TransferRequest) -> None:
        try:
            handle.wait(10)
        except TransferError:
            assert handle.state in (TransferState.FAILED, TransferState.CANCELLED)
        else:
            assert handle.state is TransferState.COMPLETED
            there = self.arrivals.wait(handle.transfer).state
            assert there is TransferState.COMPLETED
            corrupt = handle.transfer in self.corrupted()
            if req.verification is Verification.CHECKSUM or not corrupt:
                assert_moved(self.a, self.b, req)

    def corrupted(self) -> set[str]:
        return {name for backend in self.backends for name in backend.corrupted}

    @precondition(lambda self: self.open)
    @rule(data=st.data(), twice=st.booleans())
    def cancel(self, data: st.DataObject, twice: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        handle, req = self.open.pop(name)
        handle.cancel()
        if twice:
            handle.cancel()
        self.finish(handle, req)

    @rule()
    def time_passes(self) -> None:
        self.clock.advance(6.0)
        self.source.tick()
        for name, (handle, req) in list(self.open.items()):
            if req.deadline_s is not None:
                del self.open[name]
                self.finish(handle, req)

    @rule()
    def connection_breaks(self) -> None:
        self.source.disconnect(self.destination.engine_id)
        for handle, req in self.open.values():
            self.finish(handle, req)
        self.open.clear()
        if not self.source.peers:
            self.source.connect(self.destination.listen_address)

    @invariant()
    def pins_are_those_of_transfers_in_flight(self) -> None:
        if not self.open:
            assert self.source.pinned("a", IDS) == []

    def teardown(self) -> None:
        for handle, _ in self.open.values():
            handle.cancel()
        for handle, req in self.open.values():
            self.finish(handle, req)
        self.source.close()
        self.destination.close()
        assert self.source.pinned("a", IDS) == []
        assert self.destination.pinned("b", IDS) == []
        for backend in self.backends:
            assert backend.opened_halves == backend.closed_halves


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
