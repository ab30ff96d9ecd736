"""A hand-off as two schedulers see it: one test a rule. The state machine is in
test_handoff_machine.py."""

import pytest

from flowkv_jax.engine.admission import Deferred, Reserved
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.step import ScheduledStep, TokenUpdate
from flowkv_jax.errors import DuplicateRequestError, ValidationError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request, RequestStatus
from flowkv_jax.sampling_params import SamplingParams
from tests.test_scheduler import EOS, SIZE, add, chunks, decodes, make, request, run_step


def prefilled(
    scheduler: Scheduler, name: str = "a", num_tokens: int = 10, **fields
) -> tuple[Request, ScheduledStep]:
    """A request whose prompt was scheduled in one step, to be handed off."""
    item = request(name, num_tokens, hands_off=True, **fields)
    add(scheduler, item)
    return item, scheduler.schedule(0.0)


def sending(scheduler: Scheduler, name: str = "a", num_tokens: int = 10, **fields) -> Request:
    item, step = prefilled(scheduler, name, num_tokens, **fields)
    scheduler.update(step, [7] * len(step.sampling), 0.0)
    return item


def twin(item: Request, **fields) -> Request:
    """The request at its decode node, before the token that was sampled at its prefill node."""
    tokens = list(item.prompt_token_ids)
    return request(item.request_id, len(tokens), tokens=tokens, **fields)


def filler(scheduler: Scheduler, num_tokens: int, name: str = "filler") -> Request:
    """A request that runs, holds blocks for `num_tokens` tokens and one, and does not end."""
    item = request(name, num_tokens, max_tokens=scheduler.max_request_tokens - num_tokens)
    add(scheduler, item)
    run_step(scheduler)
    return item


# Known output


def test_known_output_is_computed_with_the_prompt_and_counts_as_output():
    scheduler, kv = make()
    item = request("a", 6, max_tokens=4, known_output_token_ids=(1, 2))
    assert (item.num_prompt_tokens, item.num_tokens, item.output_token_ids) == (6, 8, [1, 2])
    add(scheduler, item)
    assert chunks(run_step(scheduler)) == [("a", 0, 8, True)]
    step = run_step(scheduler)
    assert step.decodes[0].start == 8
    assert item.output_token_ids == [1, 2, 7, 7]
    assert item.finish_reason == "length"
    kv.check()


def test_known_output_counts_for_min_tokens():
    scheduler, _ = make()
    params = SamplingParams(min_tokens=3, max_tokens=8)
    item = request("a", 6, params=params, known_output_token_ids=(1,))
    add(scheduler, item)
    run_step(scheduler, EOS)
    assert not item.is_finished
    run_step(scheduler, EOS)
    assert item.output_token_ids == [1, EOS, EOS]
    assert item.finish_reason == "stop"


def test_known_output_that_leaves_no_room_is_refused():
    scheduler, _ = make()
    item = request("a", 6, max_tokens=2, known_output_token_ids=(1, 2))
    with pytest.raises(ValidationError, match="2 known output tokens after a prompt of 6") as info:
        add(scheduler, item)
    assert info.value.parameter == "known_output_token_ids"
    assert not scheduler.has_work


def test_cached_tokens_of_known_output_are_no_prompt_tokens():
    scheduler, _ = make()
    tokens = list(range(12))
    add(scheduler, request("a", 12, tokens=tokens))
    run_step(scheduler)
    item = request("b", 6, tokens=tokens[:6], known_output_token_ids=tokens[6:])
    add(scheduler, item)
    assert chunks(run_step(scheduler)) == [("b", 8, 4, True)]
    assert item.num_cached_tokens == 6


# The prefill side


def test_hands_off_is_sending_once_its_last_chunk_is_scheduled():
    scheduler, kv = make()
    item = request("a", 40, hands_off=True)
    add(scheduler, item)
    first = scheduler.schedule(0.0)
    assert (chunks(first), item.status) == ([("a", 0, 32, False)], RequestStatus.RUNNING)
    last = scheduler.schedule(0.0)
    assert (chunks(last), item.status) == ([("a", 32, 8, True)], RequestStatus.SENDING)
    scheduler.update(first, [], 0.0)
    # Its first token is still in flight, and it is not decoded.
    assert scheduler.schedule(0.0).is_empty
    assert scheduler.update(last, [7], 1.0) == [TokenUpdate(item, 7, False)]
    assert (item.first_token_s, item.num_in_flight, item.output_token_ids) == (1.0, 0, [7])
    assert scheduler.schedule(1.0).is_empty
    assert kv.holds_blocks("a")
    assert (scheduler.num_sending, scheduler.num_running) == (1, 0)
    assert not scheduler.has_work
    assert scheduler.is_waiting_for_transfers


def test_the_first_token_may_be_the_last():
    scheduler, kv = make()
    item, step = prefilled(scheduler)
    assert scheduler.update(step, [EOS], 0.0) == [TokenUpdate(item, EOS, True)]
    assert (item.finish_reason, scheduler.num_sending) == ("stop", 0)
    assert kv.num_free_blocks == 64


def test_sent_on_it_ends_without_a_reason_and_leaves_its_blocks_in_the_cache():
    scheduler, kv = make()
    item = sending(scheduler)
    assert scheduler.finish(item, None, None, 1.0)
    assert (item.is_finished, item.finish_reason) == (True, None)
    assert kv.num_free_blocks == 64
    assert kv.match_prefix(twin(item)) == 8


def test_what_is_sending_has_no_seat_but_a_row_in_its_step():
    scheduler, _ = make(max_num_seqs=2)
    items = [request(name, 4, hands_off=True) for name in "abc"]
    add(scheduler, *items)
    first = scheduler.schedule(0.0)
    # Both seats are free again, but a step has two rows.
    assert [name for name, *_ in chunks(first)] == ["a", "b"]
    assert [name for name, *_ in chunks(scheduler.schedule(0.0))] == ["c"]
    assert scheduler.num_sending == 3


def test_sending_is_not_preempted_and_the_last_running_makes_room_instead():
    scheduler, kv = make(num_blocks=6)
    first = filler(scheduler, 7)
    held = sending(scheduler, "b", 12, max_tokens=4)
    assert (kv.num_free_blocks, held.status) == (1, RequestStatus.SENDING)
    while scheduler.num_running:
        step = run_step(scheduler)
    # The only running request had to give up its own blocks: an empty step that transfers explain.
    assert step.preempted == ("filler",)
    assert step.is_empty
    assert first.status is RequestStatus.WAITING
    assert held.status is RequestStatus.SENDING
    assert scheduler.has_work
    assert scheduler.is_waiting_for_transfers
    assert scheduler.schedule(0.0).is_empty
    scheduler.finish(held, None, None, 0.0)
    assert run_step(scheduler).num_tokens


@pytest.mark.parametrize(
    ("num_swap", "status"), [(16, RequestStatus.SWAPPED), (0, RequestStatus.WAITING)]
)
def test_a_preempted_prompt_comes_back_and_is_sent(num_swap, status):
    scheduler, kv = make(num_blocks=12, num_swap_blocks=num_swap, max_num_batched_tokens=8)
    first = filler(scheduler, 4)
    item = request("b", 36, max_tokens=4, hands_off=True, arrival_s=1.0)
    add(scheduler, item)
    run_step(scheduler)
    assert kv.allocate(request("somebody", 1), SIZE * kv.num_free_blocks)
    while not item.num_preemptions:
        run_step(scheduler)
    assert item.status is status
    kv.free("somebody")
    scheduler.finish(first, "abort", None, 0.0)
    while item.status is not RequestStatus.SENDING:
        assert run_step(scheduler).num_tokens
    assert (item.output_token_ids, item.num_computed_tokens) == ([7], 36)
    assert scheduler.schedule(0.0).is_empty
    kv.check()


def test_send_of_what_decodes():
    scheduler, kv = make()
    item = request("a", 6)
    add(scheduler, item)
    run_step(scheduler)
    scheduler.send(item)
    assert item.status is RequestStatus.SENDING
    assert (item.num_tokens, item.num_computed_tokens) == (7, 6)
    assert run_step(scheduler).is_empty
    scheduler.keep(item, 0.0)
    assert decodes(run_step(scheduler)) == ["a"]
    kv.check()


def test_send_waits_for_the_token_in_flight_and_schedules_no_other():
    scheduler, kv = make()
    item, other = request("a", 6), request("b", 6)
    add(scheduler, item, other)
    run_step(scheduler)
    step = scheduler.schedule(0.0)
    scheduler.send(item)
    assert item.status is RequestStatus.RUNNING
    following = scheduler.schedule(0.0)
    assert decodes(following) == ["b"]
    scheduler.update(step, [7, 7], 0.0)
    assert item.status is RequestStatus.SENDING
    assert (item.num_tokens, item.num_computed_tokens) == (8, 7)
    scheduler.update(following, [7], 0.0)
    kv.check()


def test_the_token_in_flight_may_end_what_is_to_be_sent():
    scheduler, _ = make()
    item = request("a", 6)
    add(scheduler, item)
    run_step(scheduler)
    step = scheduler.schedule(0.0)
    scheduler.send(item)
    scheduler.update(step, [EOS], 0.0)
    assert item.finish_reason == "stop"


def test_send_of_what_waits_takes_effect_with_its_last_chunk():
    scheduler, _ = make(max_num_batched_tokens=8)
    item, other = request("a", 12), request("b", 4)
    add(scheduler, item, other)
    scheduler.send(other)
    assert chunks(run_step(scheduler)) == [("a", 0, 8, False)]
    scheduler.send(item)
    run_step(scheduler)
    run_step(scheduler)
    assert {item.status, other.status} == {RequestStatus.SENDING}


@pytest.mark.parametrize("num_swap_blocks", [0, 16])
def test_send_of_what_was_preempted(num_swap_blocks):
    scheduler, kv = make(10, num_swap_blocks=num_swap_blocks)
    first, item = request("a", 16, max_tokens=20), request("b", 16, max_tokens=20)
    add(scheduler, first, item)
    while item.status is RequestStatus.RUNNING or not item.num_preemptions:
        run_step(scheduler)
    scheduler.send(item)
    num_tokens = item.num_tokens
    scheduler.abort("a", 0.0)
    while item.status is not RequestStatus.SENDING:
        run_step(scheduler)
    assert item.num_tokens == num_tokens + 1
    assert item.num_computed_tokens == num_tokens
    kv.check()


def test_send_is_checked():
    scheduler, _ = make()
    item = request("a", 6)
    with pytest.raises(RuntimeError, match="not of this node"):
        scheduler.send(item)
    scheduler.reserve(item, 0.0)
    with pytest.raises(RuntimeError, match="RECEIVING"):
        scheduler.send(item)


def test_keep_decodes_here_after_all():
    scheduler, _ = make()
    item = sending(scheduler)
    scheduler.keep(item, 1.0)
    assert (item.status, item.hands_off) == (RequestStatus.RUNNING, False)
    step = run_step(scheduler)
    assert (decodes(step), step.decodes[0].start) == (["a"], 10)
    assert item.output_token_ids == [7, 7]


def test_keep_without_a_seat_waits_and_computes_little_again():
    scheduler, kv = make(max_num_seqs=1)
    item = sending(scheduler, num_tokens=11)
    other = filler(scheduler, 4)
    scheduler.keep(item, 1.0)
    assert (item.status, item.num_computed_tokens) == (RequestStatus.WAITING, 0)
    assert not kv.holds_blocks("a")
    scheduler.finish(other, "abort", None, 1.0)
    assert chunks(run_step(scheduler)) == [("a", 8, 4, True)]
    assert item.output_token_ids == [7, 7]
    # Not sent a second time, and what it found in the cache was its own.
    assert (item.status, item.num_cached_tokens) == (RequestStatus.RUNNING, 0)
    kv.check()


def test_keep_needs_the_first_token():
    scheduler, _ = make()
    item, step = prefilled(scheduler)
    with pytest.raises(RuntimeError, match="first token has not been read"):
        scheduler.keep(item, 0.0)
    scheduler.update(step, [7], 0.0)
    scheduler.keep(item, 0.0)
    with pytest.raises(RuntimeError, match="a is RUNNING or not of this node, not SENDING"):
        scheduler.keep(item, 0.0)


# The decode side


def test_reserve_then_receive_then_decode():
    scheduler, kv = make()
    item = request("a", 11, max_tokens=3)
    assert scheduler.reserve(item, 0.0) == Reserved(0)
    assert (item.status, scheduler.num_receiving) == (RequestStatus.RECEIVING, 1)
    # The prompt, and the token that its prefill node samples.
    assert kv.block_ids("a") == [0, 1, 2]
    assert not scheduler.has_work
    assert scheduler.schedule(0.0).is_empty
    assert scheduler.is_waiting_for_transfers
    scheduler.receive(item, [7], 2.0)
    assert (item.first_token_s, item.scheduled_s, item.last_token_s) == (2.0, 2.0, 2.0)
    assert (item.status, item.num_computed_tokens) == (RequestStatus.RUNNING, 11)
    step = scheduler.schedule(2.0)
    assert (decodes(step), step.decodes[0].start) == (["a"], 11)
    scheduler.update(step, [8], 3.0)
    run_step(scheduler, 9)
    assert (item.output_token_ids, item.finish_reason) == ([7, 8, 9], "length")
    assert kv.num_free_blocks == 64


def test_blocks_for_the_next_token_only_if_there_can_be_one():
    scheduler, kv = make(num_blocks=3)
    item = request("a", 12, max_tokens=1)
    assert scheduler.reserve(item, 0.0) == Reserved(0)
    assert kv.num_free_blocks == 0
    scheduler.receive(item, [7], 0.0)
    assert item.finish_reason == "length"


@pytest.mark.parametrize(
    ("tokens", "reason", "output"),
    [([EOS], "stop", [EOS]), ([7, 7, 7], "length", [7, 7]), ([7, EOS, 7], "stop", [7, EOS])],
)
def test_what_arrives_may_have_ended(tokens, reason, output):
    scheduler, kv = make()
    item = request("a", 10, max_tokens=2)
    scheduler.reserve(item, 0.0)
    scheduler.receive(item, tokens, 0.0)
    assert (item.finish_reason, item.output_token_ids) == (reason, output)
    assert kv.num_free_blocks == 64
    assert scheduler.schedule(0.0).is_empty


def test_receive_is_checked():
    scheduler, _ = make()
    item = request("a", 10)
    with pytest.raises(RuntimeError, match="not RECEIVING"):
        scheduler.receive(item, [7], 0.0)
    scheduler.reserve(item, 0.0)
    with pytest.raises(ValueError, match="without a sampled token"):
        scheduler.receive(item, [], 0.0)
    with pytest.raises(ValueError, match="K/V of 13 tokens; blocks were reserved for 12"):
        scheduler.receive(item, [7] * 4, 0.0)
    assert item.status is RequestStatus.RECEIVING


def test_known_output_comes_with_the_prompt():
    scheduler, _ = make()
    item = request("a", 6, max_tokens=4, known_output_token_ids=(1, 2))
    assert isinstance(scheduler.reserve(item, 0.0), Reserved)
    scheduler.receive(item, [3], 0.0)
    assert item.num_computed_tokens == 8
    run_step(scheduler, 4)
    assert (item.output_token_ids, item.finish_reason) == ([1, 2, 3, 4], "length")


def test_reserve_refuses_what_add_refuses():
    scheduler, kv = make(num_blocks=4)
    with pytest.raises(ValidationError, match="the pool has 4"):
        scheduler.reserve(request("a", 4, max_tokens=100), 0.0)
    scheduler.reserve(request("b", 4), 0.0)
    with pytest.raises(DuplicateRequestError):
        scheduler.reserve(request("b", 4), 0.0)
    with pytest.raises(DuplicateRequestError):
        scheduler.add(request("b", 4), 0.0)
    kv.check()


def test_cached_blocks_are_shared_and_need_not_be_sent():
    scheduler, kv = make()
    tokens = list(range(12))
    first = request("a", 12, tokens=tokens)
    add(scheduler, first)
    run_step(scheduler)
    # All of its full blocks, unlike a prompt that is computed here.
    item = request("b", 12, tokens=tokens)
    assert kv.match_prefix(item) == 8
    assert scheduler.reserve(item, 0.0) == Reserved(12)
    assert kv.block_ids("b")[:3] == kv.block_ids("a")[:3]
    assert (item.num_computed_tokens, kv.prefix_cache_hits) == (12, 12)
    kv.check()
    scheduler.receive(item, [9], 0.0)
    run_step(scheduler)
    kv.check()
    assert kv.block_ids("b")[3] != kv.block_ids("a")[3]


def test_prompt_logprobs_were_computed_elsewhere_so_the_cache_serves():
    scheduler, _ = make()
    tokens = list(range(12))
    add(scheduler, request("a", 12, tokens=tokens))
    run_step(scheduler)
    params = SamplingParams(prompt_logprobs=0, max_tokens=2)
    item = request("b", 12, tokens=tokens, params=params)
    assert scheduler.reserve(item, 0.0) == Reserved(12)


def test_what_is_on_its_way_is_not_in_the_cache_before_it_has_arrived():
    scheduler, kv = make()
    item = request("a", 12)
    scheduler.reserve(item, 0.0)
    assert kv.num_cached_blocks == 0
    scheduler.receive(item, [7], 0.0)
    assert kv.match_prefix(twin(item, params=SamplingParams())) == 8
    lost = request("b", 12)
    scheduler.reserve(lost, 0.0)
    scheduler.finish(lost, "error", None, 0.0)
    assert kv.num_cached_blocks == 3
    kv.check()


# Deferred


def deferred_reason(scheduler: Scheduler, kv: KVCacheManager, item: Request) -> str:
    """Why it is deferred, and that nothing changed."""
    before = kv.num_free_blocks, kv.num_cached_blocks, scheduler.load()
    answer = scheduler.reserve(item, 0.0)
    assert isinstance(answer, Deferred)
    assert (kv.num_free_blocks, kv.num_cached_blocks, scheduler.load()) == before
    assert item.status is RequestStatus.WAITING
    assert scheduler.get(item.request_id) is None
    return answer.reason


def test_no_seat():
    scheduler, kv = make(max_num_seqs=2)
    filler(scheduler, 4)
    assert isinstance(scheduler.reserve(request("a", 4), 0.0), Reserved)
    item = request("b", 4)
    assert deferred_reason(scheduler, kv, item) == "no seat: 2 of 2 running"
    # Neither is there one for a prompt that waits: what arrives must be able to run.
    add(scheduler, request("c", 4))
    assert not run_step(scheduler).prefills
    scheduler.abort("a", 0.0)
    assert isinstance(scheduler.reserve(item, 0.0), Reserved)


def test_no_blocks_beside_the_reserve():
    scheduler, kv = make(num_blocks=10)
    filler(scheduler, 18)
    item = request("a", 19)
    assert kv.num_free_blocks == 5
    assert deferred_reason(scheduler, kv, item) == ("no blocks: needs 5, 4 free beside the reserve")
    assert isinstance(scheduler.reserve(request("b", 15), 0.0), Reserved)
    assert deferred_reason(scheduler, kv, item) == ("no blocks: needs 5, 0 free beside the reserve")


def test_hits_that_nobody_holds_are_no_room():
    scheduler, kv = make(num_blocks=6)
    tokens = list(range(16))
    add(scheduler, request("a", 16, tokens=tokens, max_tokens=1))
    run_step(scheduler)
    filler(scheduler, 7)
    item = request("b", 17, tokens=[*tokens, 99], max_tokens=4)
    assert kv.num_free_blocks == 4
    assert "needs 5" in deferred_reason(scheduler, kv, item)
    assert isinstance(scheduler.reserve(request("c", 11, tokens=tokens[:11]), 0.0), Reserved)
    kv.check()


def test_those_who_gave_up_blocks_go_first():
    for num_swap_blocks, reason in (
        (8, "swapped requests wait"),
        (0, "requests that gave up their blocks wait"),
    ):
        scheduler, kv = make(num_blocks=6, num_swap_blocks=num_swap_blocks)
        first, second = request("a", 8, max_tokens=16), request("b", 8, max_tokens=16)
        add(scheduler, first, second)
        while not second.num_preemptions:
            run_step(scheduler)
        scheduler.finish(first, "abort", None, 0.0)
        item = request("c", 4)
        assert deferred_reason(scheduler, kv, item) == reason
        run_step(scheduler)
        assert second.status is RequestStatus.RUNNING
        assert deferred_reason(scheduler, kv, item).startswith("no blocks")


def test_waiting_requests_hold_nothing_and_do_not_come_first():
    scheduler, _ = make(num_blocks=8)
    filler(scheduler, 10)
    large = request("large", 20)
    add(scheduler, large)
    assert not run_step(scheduler).prefills
    assert isinstance(scheduler.reserve(request("a", 7), 0.0), Reserved)


def test_growth_of_what_is_received_is_reserved_as_of_what_runs():
    scheduler, kv = make(num_blocks=6)
    scheduler.reserve(request("a", 8), 0.0)
    add(scheduler, request("b", 12))
    assert kv.num_free_blocks == 3
    assert scheduler.schedule(0.0).is_empty
    assert scheduler.is_waiting_for_transfers
    scheduler.abort("a", 0.0)
    assert chunks(scheduler.schedule(0.0)) == [("b", 0, 12, True)]


def test_blocks_that_a_step_under_way_writes_are_not_given_to_a_transfer():
    scheduler, kv = make(num_blocks=4, prefill_tile=1)
    item = request("a", 2, max_tokens=5)
    add(scheduler, item)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert kv.block_ids("a") == [0]
    scheduler.update(first, [EOS], 0.0)
    # Ended, and its block is free; but the decode in `second` will still write to it.
    assert kv.num_free_blocks == 4
    arriving = request("b", 6, max_tokens=4)
    assert isinstance(scheduler.reserve(arriving, 0.0), Reserved)
    assert kv.block_ids("b") == [1, 2]
    late = request("c", 3)
    assert "0 free" in deferred_reason(scheduler, kv, late)
    scheduler.update(second, [7], 0.0)
    assert isinstance(scheduler.reserve(late, 0.0), Reserved)
    assert kv.block_ids("c") == [0]
    kv.check()


def test_blocks_that_a_step_under_way_swaps_are_not_given_to_a_transfer():
    scheduler, kv = make(num_blocks=6, num_swap_blocks=8)
    first, second = request("a", 8, max_tokens=16), request("b", 8, max_tokens=16)
    add(scheduler, first, second)
    while not (step := scheduler.schedule(0.0)).swap_out:
        scheduler.update(step, [7] * len(step.sampling), 0.0)
    scheduler.finish(second, "abort", None, 0.0)
    item = request("c", 3)
    assert deferred_reason(scheduler, kv, item) == "a step that swaps is under way"
    scheduler.update(step, [7], 0.0)
    assert isinstance(scheduler.reserve(item, 0.0), Reserved)


def test_a_preempted_request_waits_for_its_token_even_if_no_step_lies_between():
    scheduler, _ = make(num_blocks=6)
    item = filler(scheduler, 7)
    held = sending(scheduler, "b", 9, max_tokens=4)
    while item.num_tokens < 12:
        run_step(scheduler)
    step = scheduler.schedule(0.0)
    assert decodes(step) == ["filler"]
    assert scheduler.schedule(0.0).preempted == ("filler",)
    scheduler.finish(held, None, None, 0.0)
    assert scheduler.schedule(0.0).is_empty
    scheduler.update(step, [8], 0.0)
    assert chunks(scheduler.schedule(0.0)) == [("filler", 12, 1, True)]
    assert item.output_token_ids[-1] == 8


# Ends


@pytest.mark.parametrize("is_sender", [True, False])
@pytest.mark.parametrize("way", ["finish", "abort", "deadline", "fail_all"])
def test_every_end_frees_a_half_done_hand_off(way, is_sender):
    scheduler, kv = make()
    if is_sender:
        item = sending(scheduler, deadline_s=5.0)
    else:
        item = request("a", 10, deadline_s=5.0)
        scheduler.reserve(item, 0.0)
    assert scheduler.next_deadline_s == 5.0
    reason = "error"
    if way == "finish":
        assert scheduler.finish(item, "error", None, 1.0)
    elif way == "abort":
        assert scheduler.abort("a", 1.0) is item
        reason = "abort"
    elif way == "deadline":
        assert scheduler.schedule(5.0).expired == (item,)
    else:
        assert scheduler.fail_all(1.0) == [item]
    assert (item.finish_reason, scheduler.next_deadline_s) == (reason, None)
    assert kv.num_free_blocks == 64
    assert not scheduler.is_waiting_for_transfers
    kv.check()


def test_a_reserved_request_gets_the_default_deadline():
    scheduler, _ = make(request_timeout_s=3.0)
    item = request("a", 4)
    scheduler.reserve(item, 1.0)
    assert item.deadline_s == 4.0


def test_blocks_of_an_ended_sender_are_no_room_while_pinned():
    scheduler, kv = make(num_blocks=4)
    item = sending(scheduler, num_tokens=14, max_tokens=2)
    blocks = kv.block_ids("a")
    kv.pin(blocks)
    scheduler.finish(item, None, None, 0.0)
    add(scheduler, request("b", 12, max_tokens=4))
    assert scheduler.schedule(0.0).is_empty
    assert scheduler.is_waiting_for_transfers
    kv.unpin(blocks)
    assert chunks(scheduler.schedule(0.0)) == [("b", 0, 12, True)]


def test_load_counts_hand_offs():
    scheduler, _ = make()
    sending(scheduler)
    scheduler.reserve(request("b", 4), 0.0)
    scheduler.reserve(request("c", 4), 0.0)
    load = scheduler.load()
    assert (load.num_requests_sending, load.num_requests_receiving) == (1, 2)
    assert (load.num_requests_running, load.num_requests_waiting) == (0, 0)
    assert load.kv_cache_usage == 7 / 64
    assert load.num_blocks - load.num_free_blocks == sum(-(-n // SIZE) for n in (10, 5, 5))
