"""What routers say of hand-offs between servers, and what is held for them: checks and books."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowkv_jax.cluster.facts import ModelFacts
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import WireSpecs, specs_to_wire
from flowkv_jax.config import EngineConfig, load_config
from flowkv_jax.errors import ConfigError, UnprocessableError, ValidationError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.kv_transfer import messages
from flowkv_jax.kv_transfer.addresses import default_networks, is_allowed, parse_networks
from flowkv_jax.kv_transfer.borrower import BORROWED_MOVES, BorrowedNode, BorrowedState
from flowkv_jax.kv_transfer.config import KVRole
from flowkv_jax.kv_transfer.holds import HOLD_MOVES, Holds, HoldState
from flowkv_jax.kv_transfer.info import pairing_protocol
from flowkv_jax.kv_transfer.lender import Lender
from flowkv_jax.kv_transfer.params import (
    RemoteDecode,
    RemotePrefill,
    answer_params,
    read_params,
)
from flowkv_jax.request import Request
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate
from pallas_kernels.kv_layout import KVLayout

REMOTE = RemotePrefill(
    engine_id="e1", node="hybrid-0.e1", host="10.1.2.3", port=14579, request_id="r-1"
)
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


# What routers say


def test_a_router_has_a_prompt_computed_and_brings_the_answer_to_the_other_server() -> None:
    assert read_params(TO_PREFILL, "kv_producer") == RemoteDecode()
    answer = answer_params(REMOTE, [4, 5, 6], tensor_parallel_size=2)
    assert answer["remote_block_ids"] == [4, 5, 6]
    assert answer["tp_size"] == 2
    assert read_params(answer, "kv_consumer") == REMOTE
    assert read_params(answer | {"unknown": [1] * 1000}, "kv_both") == REMOTE


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "x": 1}])
def test_a_request_may_have_no_part_in_a_hand_off(params: Any) -> None:
    assert read_params(params, None) is None


@pytest.mark.parametrize(
    ("params", "role", "named"),
    [
        (TO_PREFILL, None, "no kv_role"),
        (TO_PREFILL, "kv_consumer", "kv_role=kv_consumer; it takes kv_producer or kv_both"),
        (answer_params(REMOTE, [], 1), "kv_producer", "it takes kv_consumer or kv_both"),
    ],
)
def test_a_server_without_that_part_refuses(
    params: dict[str, Any], role: KVRole | None, named: str
) -> None:
    with pytest.raises(UnprocessableError, match=named):
        read_params(params, role)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_remote_prefill", 1),
        ("do_remote_decode", "yes"),
        ("do_remote_decode", True),
        ("remote_engine_id", None),
        ("remote_engine_id", ["e1"]),
        ("remote_engine_id", "e" * 1025),
        ("remote_request_id", ""),
        ("remote_request_id", "\ud800"),
        ("remote_host", 10),
        ("remote_host", "h" * 257),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", "14579"),
        ("remote_port", True),
        ("remote_port", 1.5),
        pytest.param("remote_port", 10**5000, id="digits"),
        ("remote_node", None),
        ("remote_node", "../etc"),
        ("remote_node", "n" * 65),
    ],
)
def test_malformed_params_name_the_key(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as raised:
        read_params(answer_params(REMOTE, [], 1) | {key: value}, "kv_both")
    assert raised.value.parameter is not None
    assert raised.value.parameter.startswith("kv_transfer_params.do_remote_prefill") or (
        raised.value.parameter == f"kv_transfer_params.{key}"
    )
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("params", ["x", [1], 3, {str(i): i for i in range(65)}])
def test_params_are_a_bounded_mapping(params: Any) -> None:
    with pytest.raises(ValidationError, match="kv_transfer_params"):
        read_params(params, "kv_both")


# Where servers may be


@pytest.mark.parametrize(
    ("host", "at_loopback", "at_network"),
    [
        ("127.0.0.1", True, True),
        ("127.9.9.9", True, True),
        ("::1", True, True),
        ("::ffff:127.0.0.1", True, True),
        ("10.1.2.3", False, True),
        ("192.168.0.9", False, True),
        ("172.31.255.255", False, True),
        ("fd00::1", False, True),
        ("172.32.0.1", False, False),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("fe80::1", False, False),
        ("8.8.8.8", False, False),
        ("0.0.0.0", False, False),
        ("localhost", False, False),
        ("example.org", False, False),
        ("2130706433", False, False),
        ("127.1", False, False),
        ("", False, False),
        ("10.1.2.3/8", False, False),
    ],
)
def test_default_networks(host: str, at_loopback: bool, at_network: bool) -> None:
    assert is_allowed(host, default_networks(is_loopback=True)) == at_loopback
    assert is_allowed(host, default_networks(is_loopback=False)) == at_network


def test_networks_can_be_named() -> None:
    networks = parse_networks("8.8.8.8, 10.0.0.0/8,2001:db8::/32")
    allowed = ["8.8.8.8", "10.255.0.1", "2001:db8::7"]
    assert [host for host in [*allowed, "127.0.0.1", "8.8.8.9"] if is_allowed(host, networks)] == (
        allowed
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kv_peers", "10.0.0.1/8"),
        ("kv_peers", "my-host"),
        ("kv_peers", ""),
        ("kv_peers", ",".join(["10.0.0.1"] * 300)),
        ("kv_host", "0.0.0.0"),
        ("kv_host", ""),
        ("kv_port", -1),
        ("kv_port", 65536),
        ("kv_hold_s", 0),
        ("kv_load_timeout_s", float("inf")),
        ("kv_role", "producer"),
    ],
)
def test_settings_name_what_is_wrong(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        load_config(EngineConfig, overrides={setting: value})


def test_prompts_for_others_are_kept_in_the_prefix_cache() -> None:
    off = {"enable_prefix_caching": False}
    assert load_config(EngineConfig, overrides=off | {"kv_role": "kv_consumer"})
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        load_config(EngineConfig, overrides=off | {"kv_role": "kv_both"})


def test_pairing_protocol_tells_servers_apart_whose_kv_differ() -> None:
    facts = {"dtype": "float32", "block_size": 16}
    same = pairing_protocol(dict(reversed(facts.items())), "1.0")
    others = [
        pairing_protocol(facts | {"dtype": "bfloat16"}, "1.0"),
        pairing_protocol(facts, "1.1"),
    ]
    assert pairing_protocol(facts, "1.0") == same
    assert same not in others


# What servers say


def facts() -> ModelFacts:
    layout = KVLayout(
        num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32", dtype_bytes=4
    )
    return ModelFacts(
        architecture="LlamaForCausalLM", config_digest="c", weights_digest="w", layout=layout
    )


def test_messages_are_told_from_those_of_hand_offs() -> None:
    forget = messages.Forget("r-1")
    payload = messages.encode(forget)
    assert messages.is_message(payload)
    assert messages.decode(payload) == forget
    assert not messages.is_message(payload[1:])
    assert not messages.is_message(b"")


@pytest.mark.parametrize("payload", [b"\xc1", b"\xc1\x91\x01", b"\xc1" + b"\x91" * 5000])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(messages.ProtocolError):
        messages.decode(payload)


# A node of another server


def test_only_the_moves_of_the_tables_are_legal() -> None:
    assert set(BORROWED_MOVES) == set(BorrowedState)
    assert set(HOLD_MOVES) == set(HoldState)
    assert not BORROWED_MOVES[BorrowedState.LOST]
    assert not HOLD_MOVES[HoldState.FREED]


def test_what_is_said_to_a_node_waits_until_its_server_is_reached_and_keeps_its_order() -> None:
    said: list[tuple[str, bytes]] = []
    node = BorrowedNode(
        "p",
        "e1",
        lambda name, payload: said.append((name, payload)),
        lambda specs: pytest.fail("nothing is started"),
        lambda node, specs: None,
    )
    node.forget("a")
    node.forget("b")
    assert said == []
    node.connected()
    node.forget("c")
    assert said == [("p", messages.encode(messages.Forget(name))) for name in "abc"]
    assert node.state is BorrowedState.CONNECTED
    assert node.lost() and not node.lost()
    node.forget("d")
    node.connected()
    assert len(said) == 3
    assert node.state is BorrowedState.LOST


# A node that is lent


class Lent:
    """A node, and the transfer engine that it is reached through."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stopped: list[SequenceKey] = []
        self.retried: list[tuple[SequenceKey, str | None]] = []
        self.told: list[tuple[str, messages.News]] = []
        self.engines = {"d": "e2", "other": "e3"}

    def start(self, specs: Any) -> Future[None]:
        self.started += [spec.sequence_id for spec in specs]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        self.retried.append((key, decode_node))

    def stop(self, orders: Any) -> None:
        self.stopped += [order.key for order in orders]

    def post(self, function: Any) -> None:
        function()

    def peer_of(self, node: str) -> str | None:
        return self.engines.get(node)

    def notify(self, node: str, payload: bytes) -> None:
        news = messages.decode(payload)
        assert isinstance(news, messages.News)
        self.told.append((node, news))


def lend(node: Lent, *, may_be_borrowed: bool = True) -> Lender:
    lender = Lender(
        node,  # type: ignore[arg-type]
        facts(),
        "1.0",
        may_be_borrowed=may_be_borrowed,
        hold_s=10.0,
        deliver=lambda name, updates: [],
    )
    lender.add_node("p", node, lender.make_holds("p", KVCacheManager(8, 4)))
    return lender


def pull(decode_node: str, version: str = "1.0") -> messages.Pull:
    spec = SequenceSpec(
        sequence_id="s",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(),
        seed=0,
        max_total_tokens=10,
        arrival_s=0.0,
        decode_node=decode_node,
    )
    return messages.Pull(version, facts(), specs_to_wire([spec], 0.0))


def test_sequences_are_started_and_stopped_for_the_server_that_pulls_them() -> None:
    node = Lent()
    lender = lend(node)
    lender.on_pull("p", "e2", pull("d"))
    assert node.started == ["s"]
    order = StopOrder(SequenceKey("s", 0), "abort")
    lender.on_stop("p", "e3", messages.Stop([order]))
    lender.on_lost("e3")
    lender.on_retry("p", "e3", messages.Retry(order.key, "other"))
    lender.on_retry("p", "e2", messages.Retry(order.key, "other"))
    assert (node.stopped, node.retried) == ([], [])
    lender.on_retry("p", "e2", messages.Retry(order.key, "d"))
    assert node.retried == [(order.key, "d")]
    lender.on_stop("p", "e2", messages.Stop([order]))
    lender.on_lost("e2")
    assert node.stopped == [order.key, order.key]
    update = SequenceUpdate(sequence_id="s", attempt=0, token_ids=(7,))
    assert lender.deliver("p", [update]) == []
    [(name, news)] = node.told
    assert (name, news.src, news.updates[0].token_ids) == ("d", "p", (7,))


@pytest.mark.parametrize("decode_node", ["other", "unknown", ""])
def test_nobody_pulls_for_the_node_of_another(decode_node: str) -> None:
    node = Lent()
    lend(node).on_pull("p", "e2", pull(decode_node))
    assert (node.started, node.told) == ([], [])


@pytest.mark.parametrize(
    ("may_be_borrowed", "version", "named"),
    [(True, "1.1", "version 1.0 here, 1.1 there"), (False, "1.0", "kv_role=kv_producer")],
)
def test_a_refusal_names_what_differs(may_be_borrowed: bool, version: str, named: str) -> None:
    node = Lent()
    lend(node, may_be_borrowed=may_be_borrowed).on_pull("p", "e2", pull("d", version))
    assert node.started == []
    [(name, news)] = node.told
    assert news.updates[0].error is not None
    assert (name, news.updates[0].error.name) == ("d", "RetryableRequestError")
    assert named in news.updates[0].error.text


def test_what_cannot_be_read_starts_nothing() -> None:
    node = Lent()
    good = pull("d")
    wire = WireSpecs([], good.specs.params, good.specs.specs)
    lend(node).on_pull("p", "e2", messages.Pull(good.version, good.facts, wire))
    assert (node.started, node.told) == ([], [])


# What is held


SIZE, NUM_BLOCKS, HOLD_S = 4, 16, 10.0


def compute(kv: KVCacheManager, name: str, tokens: list[int]) -> bool:
    """As a request that computes a prompt, and ends."""
    request = Request(name, tokens, SamplingParams(), arrival_s=0.0, max_total_tokens=1000, seed=0)
    if kv.admit(request) is None:
        return False
    request.num_computed_tokens = len(tokens)
    kv.commit(request)
    kv.free(name)
    return True


def tokens_of(number: int, length: int = 2 * SIZE + 1) -> list[int]:
    return [100 * number + i for i in range(length)]


def make_holds() -> tuple[KVCacheManager, Holds, list[SequenceKey]]:
    kv = KVCacheManager(NUM_BLOCKS, SIZE)
    ended: list[SequenceKey] = []
    return kv, Holds(kv, HOLD_S, ended.append), ended


def test_a_hold_keeps_the_full_blocks_of_a_prompt_until_it_expires() -> None:
    kv, holds, _ = make_holds()
    compute(kv, "a", tokens_of(1))
    assert holds.next_due_s is None
    assert len(holds.hold("a", tokens_of(1), None, now_s=1.0)) == 2
    assert (kv.num_free_blocks, holds.next_due_s) == (NUM_BLOCKS - 2, 1.0 + HOLD_S)
    assert not kv.reset_prefix_cache()
    holds.tick(1.0 + HOLD_S - 0.1)
    assert len(holds) == 1
    holds.tick(1.0 + HOLD_S)
    assert (len(holds), kv.num_free_blocks, holds.next_due_s) == (0, NUM_BLOCKS, None)
    assert holds.num_expired == 1
    kv.check()


def test_a_hold_that_is_pulled_ends_with_the_last_sequence_that_came_for_it() -> None:
    kv, holds, ended = make_holds()
    compute(kv, "a", tokens_of(1))
    holds.hold("a", tokens_of(1), None, now_s=0.0)
    one, two = SequenceKey("x", 0), SequenceKey("y", 7)
    assert holds.pull("a", one) and holds.pull("a", two)
    holds.tick(1000.0)
    assert holds.num_expired == 0
    holds.ended(two)
    assert len(holds) == 1
    holds.ended(one)
    assert (len(holds), kv.num_free_blocks) == (0, NUM_BLOCKS)
    assert not holds.pull("a", SequenceKey("z", 0))
    assert ended == [two, one]
    kv.check()


def test_holds_keep_half_of_the_pool_at_most_and_the_newest_ones() -> None:
    kv, holds, _ = make_holds()
    for number in range(1, 7):
        compute(kv, f"{number}", tokens_of(number))
        holds.hold(f"{number}", tokens_of(number), None, now_s=float(number))
        assert holds.num_blocks <= NUM_BLOCKS // 2
    assert len(holds) == 4
    assert not holds.pull("2", SequenceKey("x", 0))
    assert holds.pull("3", SequenceKey("y", 0))
    kv.check()


def test_a_hold_is_of_what_is_cached_for_the_same_salt() -> None:
    kv, holds, _ = make_holds()
    compute(kv, "a", tokens_of(1))
    assert holds.hold("a", tokens_of(1), "salt", now_s=0.0) == []
    assert holds.hold("a", tokens_of(1), None, now_s=0.0) != []
    assert len(holds) == 1
    assert holds.make_room() and not holds.make_room()
    kv.check()


class HoldMachine(RuleBasedStateMachine):
    """Prompts come, are held, pulled and given up in any order, beside others that need room."""

    names = st.integers(1, 6)
    pullers = st.integers(1, 6).map(lambda number: SequenceKey(f"s{number}", 0))

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.holds, _ = make_holds()
        self.now_s = 0.0
        self.pulling: set[SequenceKey] = set()

    @rule(number=names, length=st.integers(1, 5 * SIZE))
    def hold(self, number: int, length: int) -> None:
        tokens = tokens_of(number, length)
        if compute(self.kv, "prompt", tokens):
            self.holds.hold(f"{number}", tokens, None, self.now_s)

    @rule(number=names, puller=pullers)
    def pull(self, number: int, puller: SequenceKey) -> None:
        if puller not in self.pulling and self.holds.pull(f"{number}", puller):
            self.pulling.add(puller)

    @rule(puller=pullers)
    def end(self, puller: SequenceKey) -> None:
        self.holds.ended(puller)
        self.pulling.discard(puller)

    @rule(number=names)
    def forget(self, number: int) -> None:
        self.holds.free(f"{number}")

    @rule(seconds=st.floats(0, 2 * HOLD_S))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.holds.tick(self.now_s)
        due_s = self.holds.next_due_s
        assert due_s is None or self.now_s < due_s <= self.now_s + HOLD_S

    @rule(length=st.integers(1, NUM_BLOCKS * SIZE - 1))
    def need_room(self, length: int) -> None:
        while not compute(self.kv, "other", tokens_of(9, length)):
            assert self.holds.make_room()

    @rule()
    def lose_the_pool(self) -> None:
        self.kv.forget_all()
        self.kv.check()
        assert self.kv.num_free_blocks == NUM_BLOCKS

    @invariant()
    def books_are_right(self) -> None:
        self.kv.check()
        assert self.holds.num_blocks <= NUM_BLOCKS // 2

    def teardown(self) -> None:
        for puller in list(self.pulling):
            self.holds.ended(puller)
        self.holds.tick(self.now_s + HOLD_S)
        assert len(self.holds) == 0
        assert self.kv.num_free_blocks == NUM_BLOCKS
        self.kv.check()


TestHoldMachine = HoldMachine.TestCase
TestHoldMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
