"""Notifications: in order, none lost while the connection lives, none after a loss was told."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transfer_peer import Heard, PeerProcess, filled_pool, peer_process, request, until
from transfer import messages
from transfer.backends.defaults import default_backends
from transfer.channel import Channel
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import EngineClosed, PeerLost, RequestError, UnknownNode
from transfer.lifecycle import TransferState
from transfer.notifications import Notification, PeerLoss
from transfer.peers import Peers
from transfer.testing import Arrivals, Fault, ScriptedBackend, lose_messages


class Side:
    """An engine with a pool, and what it heard."""

    def __init__(self, node: str, config: TransferConfig | None = None) -> None:
        self.heard = Heard()
        self.pool = filled_pool(64, ord(node[0]))
        self.engine = TransferEngine(config, on_notify=self.heard.notified, on_peer_lost=self._lost)
        self.engine.register_pool(node, self.pool)
        self.engine.listen()
        self.id = self.engine.engine_id

    def _lost(self, loss: PeerLoss) -> None:
        self.heard.lost(loss)

    def connect(self, other: Side) -> None:
        self.engine.connect(other.engine.listen_address)


@contextlib.contextmanager
def sides(*nodes: str) -> Iterator[list[Side]]:
    with contextlib.ExitStack() as stack:
        made = [Side(node) for node in nodes]
        for side in made:
            stack.enter_context(side.engine)
        yield made


@pytest.fixture
def pair() -> Iterator[list[Side]]:
    """Two engines that are connected, "a" having dialled."""
    with sides("a", "b") as (a, b):
        a.connect(b)
        yield [a, b]


def numbers(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last)]


class TestDelivery:
    def test_both_ways_at_once_in_order_beside_transfers(self, pair: list[Side]) -> None:
        a, b = pair

        def speak(side: Side, to: str) -> None:
            for number in range(1000):
                side.engine.notify(to, b"%d" % number)

        threads = [threading.Thread(target=speak, args=args) for args in ((a, "b"), (b, "a"))]
        for thread in threads:
            thread.start()
        for _ in range(10):
            a.engine.submit(request([(0, 0, 8)])).wait(10)
        for thread in threads:
            thread.join()
        until(lambda: len(a.heard.entries) == len(b.heard.entries) == 1000)
        assert b.heard.entries == [("b", a.id, text) for text in numbers(0, 1000)]
        assert a.heard.entries == [("a", b.id, text) for text in numbers(0, 1000)]

    def test_a_second_connection_does_not_change_the_order(self, pair: list[Side]) -> None:
        a, b = pair
        for number in range(500):
            if number == 250:
                b.connect(a)
            a.engine.notify("b", b"%d" % number)
            b.engine.notify("a", b"%d" % number)
        until(lambda: len(a.heard.entries) == len(b.heard.entries) == 500)
        assert (a.heard.said(), b.heard.said()) == (numbers(0, 500), numbers(0, 500))

    def test_to_a_node_of_this_engine_in_the_callers_thread(self) -> None:
        got: list[tuple[threading.Thread, Notification]] = []
        with TransferEngine(on_notify=lambda n: got.append((threading.current_thread(), n))) as e:
            e.register_pool("a", filled_pool(8, 1))
            e.notify("a", b"here")
            assert got == [(threading.current_thread(), Notification("a", e.engine_id, b"here"))]

    def test_a_callback_may_answer_and_what_it_raises_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = Heard()

        def answer(notification: Notification) -> None:
            other.notify("b", b"re " + notification.payload)
            raise LookupError("of the callback")

        with (
            caplog.at_level(logging.ERROR, "transfer"),
            TransferEngine(on_notify=answer) as other,
            TransferEngine(on_notify=heard.notified) as engine,
        ):
            other.register_pool("a", filled_pool(8, 1))
            engine.register_pool("b", filled_pool(8, 2))
            engine.connect(other.listen())
            for number in range(3):
                engine.notify("a", b"%d" % number)
            until(lambda: heard.said() == ["re 0", "re 1", "re 2"])
            assert list(engine.peers) == [other.engine_id]
        assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [LookupError] * 3


class TestRefusals:
    def test_of_what_cannot_be_sent(self, pair: list[Side]) -> None:
        a, b = pair
        limit = a.engine.config.max_notification_bytes
        with pytest.raises(RequestError, match=f"a payload of {limit + 1} bytes, at most"):
            a.engine.notify("b", bytes(limit + 1))
        a.engine.notify("b", b"x" * limit)
        with pytest.raises(UnknownNode, match="no pool 'c'"):
            a.engine.notify("c", b"")
        until(lambda: len(b.heard.entries) == 1)
        b.engine.close()
        until(lambda: a.heard.said()[-1:] == ["lost"])
        with pytest.raises(PeerLost):
            a.engine.notify("b", b"")
        a.engine.close()
        with pytest.raises(EngineClosed):
            a.engine.notify("a", b"")

    def test_the_limit_must_fit_a_frame(self) -> None:
        with pytest.raises(ValueError, match="max_notification_bytes"):
            TransferConfig(max_notification_bytes=9 << 20)


class TestWhoHoldsWhat:
    def test_holds_and_peer_of(self, pair: list[Side]) -> None:
        a, b = pair
        assert (a.engine.holds("a"), a.engine.holds("b"), a.engine.holds("c")) == (
            True,
            False,
            False,
        )
        assert (a.engine.peer_of("a"), a.engine.peer_of("b")) == (None, b.id)
        a.engine.disconnect(b.id)
        until(lambda: a.engine.peer_of("b") is None)

    def test_a_pool_is_unregistered_once_nothing_uses_it(self, pair: list[Side]) -> None:
        a, b = pair
        pins = b.engine._runtime.pool("b").pins
        pins.write("a transfer", [(3, 2)])
        with pytest.raises(RequestError, match="2 blocks of b, 3 the first, are used"):
            b.engine.unregister_pool("b")
        pins.unpin_write("a transfer")
        b.engine.unregister_pool("b")
        with pytest.raises(UnknownNode):
            b.engine.unregister_pool("b")
        with pytest.raises(UnknownNode):
            pins.read([(0, 1)])
        until(lambda: a.engine.peer_of("b") is None)
        for attempt in (
            lambda: a.engine.submit(request([(0, 0, 1)])),
            lambda: a.engine.notify("b", b""),
        ):
            with pytest.raises(UnknownNode, match="no pool 'b'"):
                attempt()
        assert a.heard.entries == []
        # Another pool may take the name; here it is at the other engine.
        a.engine.register_pool("b", filled_pool(64, 3))
        a.engine.submit(request([(0, 0, 1)])).wait(10)

    def test_pools_that_come_and_go_while_engines_connect_are_heard_of(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add = Peers.add

        def change_first(self: Peers, channel: Channel, *rest: Any) -> None:
            if self is b.engine._runtime.peers:
                b.engine.register_pool("c", filled_pool(64, 3))
                b.engine.unregister_pool("b")
            add(self, channel, *rest)

        monkeypatch.setattr(Peers, "add", change_first)
        with sides("a", "b") as (a, b):
            a.connect(b)
            until(lambda: a.engine.peers == {b.id: ["c"]})
            assert (a.engine.peer_of("b"), a.engine.peer_of("c")) == (None, b.id)

    def test_a_notification_for_a_pool_that_is_gone_is_not_delivered(
        self, pair: list[Side]
    ) -> None:
        a, b = pair
        b.engine.register_pool("c", filled_pool(8, 3))
        until(lambda: a.engine.peer_of("c") == b.id)
        with b.engine._runtime.lock:
            b.engine._runtime.pools.pop("b")
        a.engine.notify("b", b"1")
        a.engine.notify("c", b"2")
        until(lambda: b.heard.said() == ["2"])
        assert [event.what for event in b.engine.events.snapshot("b")] == ["notify-refused"]


class TestLoss:
    def test_is_told_once_on_both_sides(self, pair: list[Side]) -> None:
        a, b = pair
        a.engine.notify("b", b"1")
        b.connect(a)
        until(lambda: b.heard.said() == ["1"])
        a.engine.disconnect(b.id)
        until(lambda: a.heard.said() == ["lost"] and b.heard.said() == ["1", "lost"])
        [loss] = a.heard.losses
        assert (loss.engine_id, loss.nodes, str(loss.error)) == (b.id, ("b",), "disconnected")
        assert [loss.engine_id for loss in b.heard.losses] == [a.id]
        a.connect(b)
        b.engine.notify("a", b"2")
        until(lambda: a.heard.said() == ["lost", "2"])

    def test_closing_tells_the_other_side_only(self, pair: list[Side]) -> None:
        a, b = pair
        a.engine.close()
        until(lambda: b.heard.said() == ["lost"])
        assert a.heard.entries == []

    def test_nothing_is_delivered_after_it(self) -> None:
        """Many messages wait behind a slow callback when the connection goes."""
        heard, begun, go_on = Heard(), threading.Event(), threading.Event()

        def slow(notification: Notification) -> None:
            begun.set()
            go_on.wait(10)
            heard.notified(notification)

        with (
            TransferEngine(on_notify=slow, on_peer_lost=heard.lost) as engine,
            TransferEngine() as other,
        ):
            engine.register_pool("a", filled_pool(8, 1))
            other.connect(engine.listen())
            for number in range(100):
                other.notify("a", b"%d" % number)
            assert begun.wait(10)
            closing = threading.Thread(target=engine.disconnect, args=(other.engine_id,))
            closing.start()
            until(lambda: not engine._runtime.peers.all()[0].is_open)
            go_on.set()
            closing.join()
            assert heard.said() == ["0", "lost"]

    def test_one_with_transfers_in_flight_is_told_though_the_engine_answers_again(
        self, pair: list[Side]
    ) -> None:
        """The other side has been told too, so both begin anew."""
        a, b = pair
        lost = lose_messages(b.engine, messages.Done, 1)
        handle = a.engine.submit(request([(0, 0, 60)]))
        until(lambda: bool(lost))
        a.engine.disconnect(b.id)
        handle.wait(10)
        until(lambda: a.heard.said() == b.heard.said() == ["lost"])
        assert a.engine.peer_of("b") == b.id
        a.engine.notify("b", b"3")
        until(lambda: b.heard.said() == ["lost", "3"])

    def test_transfers_are_final_before_it_is_told(self) -> None:
        states: list[TransferState] = []
        backends = [ScriptedBackend([Fault.DESTINATION_HANGS])]
        with (
            TransferEngine(
                backends=backends, on_peer_lost=lambda _: states.append(handle.state)
            ) as source,
            TransferEngine(backends=[ScriptedBackend()]) as destination,
        ):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen())
            handle = source.submit(request([(0, 0, 8)]))
            destination.close()
            until(lambda: bool(states))
            assert states == [TransferState.FAILED]

    def test_another_engine_where_the_lost_one_listened_is_met_as_such(self) -> None:
        with sides("a", "b", "c") as (a, b, c):
            a.connect(b)
            lost = lose_messages(b.engine, messages.Done, 1)
            handle = a.engine.submit(request([(0, 0, 60)]))
            until(lambda: bool(lost))
            channel = a.engine._runtime.peers.channel(b.id)
            assert channel is not None
            channel.address = c.engine.listen_address
            a.engine.disconnect(b.id)
            with pytest.raises(PeerLost):
                handle.wait(10)
            until(lambda: list(a.engine.peers) == [c.id])
            a.engine.notify("c", b"hello")
            until(lambda: c.heard.said() == ["hello"])
            assert a.heard.entries == [("b", b.id, "lost")]


OPERATIONS = st.lists(
    st.sampled_from(["a says", "b says", "a dials", "b dials", "a parts", "b parts", "transfer"]),
    max_size=25,
)


class Speaker(Side):
    """A side that knows, for everything it said, how many losses it had been told of before."""

    def __init__(self, node: str, to: str) -> None:
        self._to = to
        self._lock = threading.Lock()
        self.said: dict[int, list[str]] = defaultdict(list)
        super().__init__(node)

    def say(self, text: str) -> None:
        with self._lock:
            self.engine.notify(self._to, text.encode())
            self.said[len(self.heard.losses)].append(text)

    def _lost(self, loss: PeerLoss) -> None:
        with self._lock:
            self.heard.lost(loss)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS)
def test_each_acquaintance_delivers_a_beginning_of_what_was_said(operations: list[str]) -> None:
    """Both sides cut the conversation at the same places, and within a piece nothing is missing."""
    a, b = Speaker("a", "b"), Speaker("b", "a")
    with a.engine, b.engine:
        a.connect(b)
        for number, operation in enumerate(operations):
            name, _, what = operation.partition(" ")
            me, other = (b, a) if name == "b" else (a, b)
            with contextlib.suppress(PeerLost):
                if what == "says":
                    for part in range(3):
                        me.say(f"{number}.{part}")
                elif what == "dials":
                    me.connect(other)
                elif what == "parts":
                    me.engine.disconnect(other.id)
                else:
                    a.engine.submit(request([(0, 0, 4)]))
        until(lambda: a.engine._sender.wait_still(0))
        until(lambda: len(a.heard.losses) == len(b.heard.losses))
        until(lambda: bool(a.engine.peers) == bool(b.engine.peers))
        if a.engine.peers:
            a.say("end")
            b.say("end")
            until(lambda: a.heard.said()[-1:] == b.heard.said()[-1:] == ["end"])
        for speaker, listener in ((a, b), (b, a)):
            pieces = " ".join(listener.heard.said()).split("lost")
            assert len(pieces) == len(speaker.heard.losses) + 1
            for number, piece in enumerate(map(str.split, pieces)):
                assert speaker.said[number][: len(piece)] == piece
            if speaker.engine.peers:
                assert speaker.said[len(pieces) - 1] == pieces[-1].split()


class TestProcesses:
    def start(self, stack: contextlib.ExitStack, engine: TransferEngine) -> PeerProcess:
        peer = stack.enter_context(peer_process())
        assert engine.connect(peer.address) == ["b"]
        return peer

    def test_kill_restart_and_go_on_under_the_same_name(self) -> None:
        with contextlib.ExitStack() as stack:
            a = Side("a")
            stack.enter_context(a.engine)
            ids = []
            for round_ in range(2):
                peer = self.start(stack, a.engine)
                ids.append(peer.ask("id"))
                assert a.engine.peer_of("b") == ids[-1]
                assert peer.ask("notify a 0 50") == "ok"
                a.engine.notify("b", b"hello")
                a.engine.submit(request([(0, 0, 8)], tag=str(round_))).wait(10)
                until(lambda: len(a.heard.said(ids[-1])) == 50)
                assert json.loads(peer.ask("heard")) == [["b", a.id, "hello"]]
                peer.kill()
                until(lambda: a.heard.said(ids[-1])[-1:] == ["lost"])
                assert a.heard.said(ids[-1]) == [*numbers(0, 50), "lost"]
                with pytest.raises(PeerLost):
                    a.engine.notify("b", b"nobody")
            assert len(set(ids)) == 2 == len(a.heard.losses)

    def test_a_frozen_peer_blocks_nobody_and_hears_all_that_was_taken(self) -> None:
        with contextlib.ExitStack() as stack:
            a = Side("a")
            stack.enter_context(a.engine)
            peer = self.start(stack, a.engine)
            peer.process.send_signal(signal.SIGSTOP)
            taken = 0
            with pytest.raises(PeerLost, match="the peer does not read"):
                for number in range(200):
                    a.engine.notify("b", b"%d" % number + b" " * (1 << 19))
                    taken += 1
            peer.process.send_signal(signal.SIGCONT)
            until(lambda: len(json.loads(peer.ask("heard"))) == taken)
            texts = [text.strip() for _, _, text in json.loads(peer.ask("heard"))]
            assert texts == numbers(0, taken)
            assert a.heard.entries == []

    def test_a_peer_that_was_silent_for_too_long_hears_so_when_it_wakes(self) -> None:
        config = TransferConfig(heartbeat_s=0.05, peer_timeout_s=0.3, handshake_timeout_s=5)
        with contextlib.ExitStack() as stack:
            a = Side("a", config)
            stack.enter_context(a.engine)
            peer = self.start(stack, a.engine)
            a.engine.notify("b", b"before")
            assert peer.ask("notify a 0 1") == "ok"
            until(lambda: a.heard.said() == ["0"])
            peer.process.send_signal(signal.SIGSTOP)
            until(lambda: a.heard.said() == ["0", "lost"])
            assert "nothing came from the peer" in str(a.heard.losses[0].error)
            peer.process.send_signal(signal.SIGCONT)
            until(lambda: '"lost"' in peer.ask("heard"))
            assert peer.ask("notify a 1 1") == "PeerLost"
            a.engine.connect(peer.address)
            a.engine.notify("b", b"after")
            until(lambda: '"after"' in peer.ask("heard"))
            said = [text for _, _, text in json.loads(peer.ask("heard"))]
            assert said == ["before", "lost", "after"]

    def test_what_an_engine_was_sending_when_its_node_was_started_again_is_refused(self) -> None:
        arrivals, heard = Arrivals(), Heard()
        backends = [*default_backends(TransferConfig()), ScriptedBackend(name="scripted")]
        with (
            TransferEngine(
                backends=backends, on_arrival=arrivals, on_peer_lost=heard.lost
            ) as engine,
            peer_process(faults=[Fault.SOURCE_HANGS.value]) as old,
            peer_process() as new,
        ):
            pool = filled_pool(64, 1)
            before = pool.rows.copy()
            engine.register_pool("a", pool)
            engine.connect(old.address)
            name = old.ask("submit a 0 4 8 scripted")
            until(lambda: engine.pinned("a", list(range(64))) == list(range(4, 12)))
            old.process.send_signal(signal.SIGSTOP)
            engine.connect(new.address)
            arrival = arrivals.wait(name)
            assert (arrival.state, type(arrival.error)) == (TransferState.FAILED, PeerLost)
            assert heard.said() == ["lost"]
            old.process.send_signal(signal.SIGCONT)
            assert old.ask(f"state {name}") == "failed PeerLost"
            assert engine.pinned("a", list(range(64))) == []
            np.testing.assert_array_equal(pool.rows, before)
            engine.submit(request([(0, 0, 8)])).wait(10)

    def test_a_frozen_peer_whose_node_was_started_again_is_cut_off(self) -> None:
        with contextlib.ExitStack() as stack:
            a = Side("a")
            stack.enter_context(a.engine)
            old = self.start(stack, a.engine)
            old_id = old.ask("id")
            old.process.send_signal(signal.SIGSTOP)
            new = self.start(stack, a.engine)
            assert [loss.engine_id for loss in a.heard.losses] == [old_id]
            assert "started later" in str(a.heard.losses[0].error)
            assert list(a.engine.peers) == [a.engine.peer_of("b")] == [new.ask("id")]
            a.engine.submit(request([(0, 0, 8)])).wait(10)
            a.engine.notify("b", b"new one")
            # It wakes, and does not get back in: neither by what it had nor by dialling.
            old.process.send_signal(signal.SIGCONT)
            assert old.ask("notify a 0 1") == "PeerLost"
            host, port = a.engine.listen_address
            with pytest.raises(AssertionError, match="the peer process ended"):
                old.ask(f"connect {host} {port}")
            assert json.loads(new.ask("heard")) == [["b", a.id, "new one"]]
            assert a.heard.said(old_id) == ["lost"]
            refused = [str(event.detail) for event in a.engine.events.snapshot("listener")]
            assert any("is out of date: its node 'b' is at engine" in text for text in refused)
