"""Scheduler: one test a rule. The state machine is in test_scheduler_machine.py."""

import pytest

from flowkv_jax.config import SchedulerConfig
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.step import ScheduledStep, TokenUpdate
from flowkv_jax.errors import (
    ConfigError,
    DuplicateRequestError,
    MaxQueuedTokensError,
    QueueOverflowError,
    ValidationError,
)
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request, RequestStatus
from flowkv_jax.sampling_params import SamplingParams
from transfer import BlockRun

SIZE = 4
EOS, EXTRA_EOS, STOP = 100, 101, 102


def make(
    num_blocks: int = 64, *, num_swap_blocks: int = 0, prefill_tile: int = 8, **config
) -> tuple[Scheduler, KVCacheManager]:
    kv = KVCacheManager(num_blocks, SIZE, num_swap_blocks=num_swap_blocks)
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | config
    scheduler = Scheduler(
        SchedulerConfig(**values),
        kv,
        max_model_len=1000,
        eos_token_ids=(EOS, EXTRA_EOS),
        prefill_tile=prefill_tile,
    )
    return scheduler, kv


_next_prompt = iter(range(1_000, 1_000_000))


def request(name: str, num_tokens: int, max_tokens: int | None = 8, **fields) -> Request:
    """A request with a prompt that no other shares."""
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    tokens = fields.pop("tokens", None) or [next(_next_prompt) for _ in range(num_tokens)]
    values = {"arrival_s": 0.0, "max_total_tokens": 1000, "seed": 0} | fields
    return Request(name, tokens, params, **values)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for item in requests:
        scheduler.add(item, 0.0)


def chunks(step: ScheduledStep) -> list[tuple[str, int, int, bool]]:
    return [(s.request.request_id, s.start, s.num_tokens, s.samples) for s in step.prefills]


def decodes(step: ScheduledStep) -> list[str]:
    return [sequence.request.request_id for sequence in step.decodes]


def run_step(scheduler: Scheduler, token: int = 7, now_s: float = 0.0) -> ScheduledStep:
    """Schedule and update without overlap."""
    step = scheduler.schedule(now_s)
    scheduler.update(step, [token] * len(step.sampling), now_s)
    return step


# Prefill, decode, and their overlap


def test_prompt_then_decodes_until_max_tokens():
    scheduler, kv = make()
    item = request("a", 6, max_tokens=3)
    add(scheduler, item)
    assert chunks(run_step(scheduler)) == [("a", 0, 6, True)]
    assert [decodes(run_step(scheduler)) for _ in range(2)] == [["a"], ["a"]]
    assert item.output_token_ids == [7, 7, 7]
    assert (item.finish_reason, item.stop_reason) == ("length", None)
    assert not scheduler.has_work
    assert kv.num_free_blocks == 64
    assert scheduler.schedule(0.0).is_empty


def test_overlap_schedules_a_decode_whose_input_is_in_flight():
    scheduler, kv = make()
    item = request("a", 6, max_tokens=3)
    add(scheduler, item)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert (item.num_tokens, item.num_in_flight, item.num_computed_tokens) == (6, 2, 7)
    assert second.decodes[0].start == 6
    with pytest.raises(RuntimeError, match=r"steps \[0, 1\] must be updated first"):
        scheduler.schedule(0.0)
    assert scheduler.update(first, [7], 1.0) == [TokenUpdate(item, 7, False)]
    third = scheduler.schedule(1.0)
    assert third.decodes[0].start == 7
    scheduler.update(second, [8], 2.0)
    # The third token, in flight, is known to be the last: nothing more to schedule.
    assert scheduler.schedule(2.0).is_empty
    assert scheduler.update(third, [9], 3.0) == [TokenUpdate(item, 9, True)]
    assert item.output_token_ids == [7, 8, 9]
    assert (item.first_token_s, item.last_token_s) == (1.0, 3.0)
    kv.check()


def test_token_beyond_the_end_is_dropped():
    scheduler, kv = make()
    item = request("a", 6, max_tokens=30)
    add(scheduler, item)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.update(first, [EOS], 0.0)
    assert item.is_finished
    assert kv.num_free_blocks == 64
    assert scheduler.update(second, [7], 0.0) == []
    assert item.output_token_ids == [EOS]
    assert item.num_in_flight == 0


def test_updates_come_in_order_and_complete():
    scheduler, _ = make()
    add(scheduler, request("a", 6))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match=r"update of step 1, due are \[0, 1\]"):
        scheduler.update(second, [7], 0.0)
    with pytest.raises(ValueError, match="2 tokens for 1 sampling"):
        scheduler.update(first, [7, 7], 0.0)
    scheduler.update(first, [7], 0.0)
    with pytest.raises(RuntimeError, match=r"update of step 0, due are \[1\]"):
        scheduler.update(first, [7], 0.0)


def test_sampling_order_is_prefills_then_decodes():
    scheduler, _ = make()
    add(scheduler, request("a", 6))
    run_step(scheduler)
    add(scheduler, request("b", 5), request("c", 60))
    step = scheduler.schedule(0.0)
    assert chunks(step) == [("b", 0, 5, True), ("c", 0, 24, False)]
    assert [s.request.request_id for s in step.sampling] == ["b", "a"]
    assert step.num_tokens == 1 + 5 + 24


def test_long_prompt_goes_in_chunks_of_whole_tiles_beside_decodes():
    scheduler, _ = make()
    add(scheduler, request("a", 6, max_tokens=30))
    run_step(scheduler)
    add(scheduler, request("b", 60))
    # 31 tokens are left of the budget: three tiles of 8.
    assert chunks(run_step(scheduler)) == [("b", 0, 24, False)]
    assert chunks(run_step(scheduler)) == [("b", 24, 24, False)]
    step = run_step(scheduler)
    assert chunks(step) == [("b", 48, 12, True)]
    assert decodes(step) == ["a"]
    assert decodes(run_step(scheduler)) == ["a", "b"]


def test_several_prompts_in_one_step_and_no_sliver_for_the_last():
    scheduler, _ = make()
    add(scheduler, request("a", 10), request("b", 17), request("c", 20))
    # 5 tokens are left for c: less than a tile, so it is not even admitted.
    assert chunks(run_step(scheduler)) == [("a", 0, 10, True), ("b", 0, 17, True)]
    assert scheduler.num_waiting == 1
    assert chunks(run_step(scheduler)) == [("c", 0, 20, True)]


def test_budget_smaller_than_a_tile_does_not_stall():
    scheduler, _ = make(prefill_tile=64)
    add(scheduler, request("a", 70, max_tokens=1))
    sizes = [chunks(run_step(scheduler))[0][2] for _ in range(3)]
    assert sizes == [32, 32, 6]


def test_max_num_seqs_bounds_what_runs():
    scheduler, _ = make(max_num_seqs=2)
    add(scheduler, *(request(name, 4, max_tokens=2) for name in "abc"))
    assert len(run_step(scheduler).prefills) == 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    run_step(scheduler)
    assert chunks(run_step(scheduler)) == [("c", 0, 4, True)]


def test_cached_prefix_is_not_computed_again():
    scheduler, _ = make()
    tokens = list(range(20))
    first = request("a", 0, tokens=tokens, max_tokens=1)
    second = request("b", 0, tokens=[*tokens, 50])
    add(scheduler, first)
    run_step(scheduler)
    add(scheduler, second)
    assert chunks(run_step(scheduler)) == [("b", 20, 1, True)]
    assert second.num_cached_tokens == 20


def test_prefix_is_shared_while_its_first_user_still_prefills():
    scheduler, _ = make()
    tokens = list(range(60))
    add(scheduler, request("a", 0, tokens=tokens))
    run_step(scheduler)
    add(scheduler, request("b", 0, tokens=tokens))
    step = run_step(scheduler)
    assert chunks(step) == [("a", 32, 28, True)]
    assert chunks(run_step(scheduler)) == [("b", 56, 4, True)]


# Stopping


@pytest.mark.parametrize(
    ("token", "params", "ending"),
    [
        (EOS, {}, ("stop", None)),
        (EXTRA_EOS, {}, ("stop", EXTRA_EOS)),
        (STOP, {"stop_token_ids": [STOP]}, ("stop", STOP)),
        (EOS, {"stop_token_ids": [EOS]}, ("stop", None)),
        (STOP, {}, None),
        (EOS, {"ignore_eos": True}, None),
        (EXTRA_EOS, {"ignore_eos": True}, None),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, ("stop", EOS)),
        (EOS, {"min_tokens": 2}, None),
        (EOS, {"min_tokens": 1}, ("stop", None)),
        (EOS, {"max_tokens": 1}, ("stop", None)),
        (7, {"max_tokens": 1}, ("length", None)),
        (7, {"max_tokens": None}, None),
    ],
)
def test_stop_rules(token, params, ending):
    scheduler, _ = make()
    item = request("a", 6, params=SamplingParams(**params), max_total_tokens=200)
    add(scheduler, item)
    run_step(scheduler, token)
    assert item.is_finished == (ending is not None)
    if ending:
        assert (item.finish_reason, item.stop_reason) == ending
    assert item.output_token_ids == [token]


def test_max_total_tokens_ends_for_length():
    scheduler, _ = make()
    item = request("a", 6, max_tokens=None, max_total_tokens=8)
    add(scheduler, item)
    run_step(scheduler)
    run_step(scheduler)
    assert item.finish_reason == "length"
    assert item.num_tokens == 8


def test_finish_by_the_output_processor():
    scheduler, kv = make()
    item = request("a", 6)
    add(scheduler, item)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.update(first, [7], 0.0)
    assert scheduler.finish(item, "stop", "###", 0.0)
    assert not scheduler.finish(item, "length", None, 0.0)
    assert (item.finish_reason, item.stop_reason) == ("stop", "###")
    assert kv.num_free_blocks == 64
    assert scheduler.update(second, [7], 0.0) == []


# Coming in


def test_queue_bound_by_requests():
    scheduler, _ = make(max_waiting_requests=2)
    add(scheduler, request("a", 4), request("b", 4))
    with pytest.raises(QueueOverflowError, match="2 requests wait, max_waiting_requests=2"):
        scheduler.add(request("c", 4), 0.0)
    run_step(scheduler)
    scheduler.add(request("c", 4), 0.0)


def test_queue_bound_by_tokens():
    scheduler, _ = make(max_waiting_tokens=10)
    add(scheduler, request("a", 12))
    with pytest.raises(MaxQueuedTokensError, match="12 prompt tokens wait .* has 4"):
        scheduler.add(request("b", 4), 0.0)
    assert scheduler.load().num_waiting_tokens == 12


def test_duplicate_id():
    scheduler, _ = make()
    add(scheduler, request("a", 4))
    with pytest.raises(DuplicateRequestError, match="request_id='a' is in use"):
        scheduler.add(request("a", 4), 0.0)
    scheduler.abort("a", 0.0)
    scheduler.add(request("a", 4), 0.0)


@pytest.mark.parametrize(
    ("item", "parameter", "message"),
    [
        (request("a", 40, max_tokens=2), "max_tokens", "need 11 KV blocks .* the pool has 10"),
        (request("a", 4, max_tokens=None), "max_tokens", "may grow to 1000 tokens"),
        (request("a", 4, max_total_tokens=1001), "max_total_tokens", "max_model_len=1000"),
        (request("a", 9, max_total_tokens=9), "prompt_token_ids", "prompt of 9 tokens leaves no"),
        (Request("a", [], SamplingParams(), 0.0, 9, 0), "prompt_token_ids", "prompt is empty"),
    ],
)
def test_what_can_never_fit_is_refused(item, parameter, message):
    scheduler, _ = make(num_blocks=10)
    with pytest.raises(ValidationError, match=message) as caught:
        scheduler.add(item, 0.0)
    assert caught.value.parameter == parameter
    assert not scheduler.has_work


def test_what_just_fits_runs_to_its_end():
    scheduler, kv = make(num_blocks=10)
    item = request("a", 39, max_tokens=2)
    assert scheduler.max_request_tokens == 41
    add(scheduler, item)
    for _ in range(3):
        run_step(scheduler)
    assert item.finish_reason == "length"
    assert kv.num_free_blocks == 10


def test_budget_below_max_num_seqs_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=3 must be at least") as caught:
        make(max_num_batched_tokens=3)
    assert caught.value.parameter == "max_num_batched_tokens"


def test_priority_then_arrival():
    scheduler, _ = make(max_num_seqs=1, scheduling_policy="priority")
    add(
        scheduler,
        request("late", 4, max_tokens=1, arrival_s=2.0),
        request("early", 4, max_tokens=1, arrival_s=1.0),
        request("urgent", 4, max_tokens=1, arrival_s=3.0, priority=-1),
    )
    order = [chunks(run_step(scheduler))[0][0] for _ in range(3)]
    assert order == ["urgent", "early", "late"]


def test_fcfs_ignores_priority():
    scheduler, _ = make(max_num_seqs=1)
    add(scheduler, request("a", 4, max_tokens=1), request("b", 4, max_tokens=1, priority=-1))
    assert [chunks(run_step(scheduler))[0][0] for _ in range(2)] == ["a", "b"]


def test_admission_leaves_room_for_growth():
    scheduler, kv = make(num_blocks=8)
    add(scheduler, request("a", 16, max_tokens=10))
    run_step(scheduler)
    add(scheduler, request("b", 16, max_tokens=10))
    # b would fill the pool to the last block and a could not grow.
    assert chunks(run_step(scheduler)) == []
    assert kv.num_free_blocks == 3
    assert scheduler.load().num_preemptions == 0


# Preemption


def crowded(mode: str, num_swap_blocks: int = 8, **config):
    """Two requests that together outgrow 8 blocks, just before they do."""
    scheduler, kv = make(
        num_blocks=8, num_swap_blocks=num_swap_blocks, preemption_mode=mode, **config
    )
    first = request("a", 12, max_tokens=20)
    second = request("b", 8, max_tokens=20, arrival_s=1.0)
    add(scheduler, first, second)
    for _ in range(40):
        step = run_step(scheduler)
        if step.preempted:
            return scheduler, kv, first, second, step
    raise AssertionError("nothing was preempted")


def test_the_last_in_order_is_swapped_out_and_comes_back():
    scheduler, kv, first, second, step = crowded("auto")
    assert step.preempted == ("b",)
    assert decodes(step) == ["a"]
    assert second.status is RequestStatus.SWAPPED
    assert sum(run.num_blocks for run in step.swap_out) == kv.blocks_for(second.num_computed_tokens)
    kv.check()
    while scheduler.num_swapped:
        step = run_step(scheduler)
    assert first.is_finished
    assert sum(run.num_blocks for run in step.swap_in) > 0
    assert decodes(step) == ["b"]
    while scheduler.has_work:
        run_step(scheduler)
    assert second.num_preemptions == scheduler.load().num_preemptions == 1
    assert second.num_output_tokens == 20
    assert kv.swap_allocator.num_used == 0


@pytest.mark.parametrize(("mode", "num_swap_blocks"), [("recompute", 8), ("auto", 1), ("swap", 1)])
def test_recompute_when_told_to_or_without_swap_room(mode, num_swap_blocks):
    scheduler, kv, first, second, step = crowded(mode, num_swap_blocks)
    assert step.swap_out == ()
    assert second.status is RequestStatus.WAITING
    assert second.num_computed_tokens == 0
    num_tokens = second.num_tokens
    while second.status is RequestStatus.WAITING:
        step = run_step(scheduler)
    assert [s.request for s in step.prefills] == [second]
    # All known tokens, sampled ones included, less what the prefix cache still has.
    assert sum(step.prefills[0][1:3]) == num_tokens
    assert second.num_cached_tokens == 0
    while scheduler.has_work:
        run_step(scheduler)
    assert second.num_output_tokens == 20
    kv.check()


def test_lowest_priority_is_the_victim():
    scheduler, kv = make(num_blocks=8, scheduling_policy="priority", preemption_mode="recompute")
    low = request("low", 12, max_tokens=20, priority=5)
    high = request("high", 8, max_tokens=20, arrival_s=1.0)
    add(scheduler, low, high)
    while not (step := run_step(scheduler)).preempted:
        pass
    assert step.preempted == ("low",)
    assert decodes(step) == ["high"]
    kv.check()


def test_a_prompt_under_way_is_the_victim_if_it_is_last():
    scheduler, kv = make(num_blocks=12, preemption_mode="recompute", max_num_batched_tokens=8)
    scheduler.add(request("a", 4, max_tokens=40), 0.0)
    run_step(scheduler)
    scheduler.add(request("b", 36, max_tokens=4, arrival_s=1.0), 0.0)
    run_step(scheduler)
    for block in range(kv.num_free_blocks):
        assert kv.allocate(request(f"filler{block}", 1), 1)
    while not (step := run_step(scheduler)).preempted:
        assert scheduler.num_running == 2
    assert step.preempted == ("b",)
    assert decodes(step) == ["a"]


def test_a_decode_is_the_victim_if_it_comes_after_the_prompt_under_way():
    scheduler, kv = make(num_blocks=12, preemption_mode="recompute", max_num_batched_tokens=8)
    scheduler.add(request("b", 4, max_tokens=40, arrival_s=1.0), 0.0)
    run_step(scheduler)
    scheduler.add(request("a", 36, max_tokens=4), 0.0)
    run_step(scheduler)
    for block in range(kv.num_free_blocks):
        assert kv.allocate(request(f"filler{block}", 1), 1)
    while not (step := run_step(scheduler)).preempted:
        assert scheduler.num_running == 2
    assert step.preempted == ("b",)
    assert decodes(step) == []
    assert [sequence.request.request_id for sequence in step.prefills] == ["a"]


def test_nobody_is_admitted_into_a_shortage():
    scheduler, kv = make(num_blocks=8, scheduling_policy="priority", preemption_mode="recompute")
    add(scheduler, request("a", 12, max_tokens=20), request("b", 12, max_tokens=20, priority=5))
    run_step(scheduler)
    for block in range(kv.num_free_blocks):
        assert kv.allocate(request(f"filler{block}", 1), 1)
    scheduler.add(request("c", 4, max_tokens=2, priority=1), 0.0)
    while not (step := run_step(scheduler)).preempted:
        assert not step.prefills
    assert not step.prefills
    assert chunks(run_step(scheduler)) == [("c", 0, 4, True)]


def test_preempted_with_a_token_in_flight():
    scheduler, kv, *_ = crowded("recompute")
    for item in ("a", "b"):
        scheduler.abort(item, 0.0)
    kv.reset_prefix_cache()
    first, second = request("c", 15, max_tokens=17), request("d", 12, max_tokens=17)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    previous = scheduler.schedule(0.0)
    while not (step := scheduler.schedule(0.0)).preempted:
        scheduler.update(previous, [7] * len(previous.sampling), 0.0)
        previous = step
    assert step.preempted == ("d",)
    assert (second.status, second.num_in_flight) == (RequestStatus.WAITING, 1)
    num_tokens = second.num_tokens
    updates = scheduler.update(previous, [7] * len(previous.sampling), 0.0)
    assert TokenUpdate(second, 7, False) in updates
    assert (second.num_tokens, second.num_in_flight) == (num_tokens + 1, 0)
    kv.check()


def test_preempted_request_may_end_by_its_token_in_flight():
    scheduler, kv = make(num_blocks=5, preemption_mode="recompute", max_num_batched_tokens=16)
    first, second = request("a", 7, max_tokens=9), request("b", 4, max_tokens=4)
    add(scheduler, first, second)
    previous = scheduler.schedule(0.0)
    while scheduler.has_work:
        step = scheduler.schedule(0.0)
        scheduler.update(previous, [7] * len(previous.sampling), 0.0)
        kv.check()
        previous = step
    assert first.num_output_tokens == 9
    assert second.num_output_tokens == 4
    assert kv.num_free_blocks == 5


# Going out


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_in_any_state_frees_at_once(num_steps):
    scheduler, kv = make()
    item = request("a", 50)
    add(scheduler, item)
    steps = [scheduler.schedule(0.0) for _ in range(min(num_steps, 1))]
    for _ in range(num_steps - 1):
        steps.append(scheduler.schedule(0.0))
        done = steps.pop(0)
        scheduler.update(done, [7] * len(done.sampling), 0.0)
    assert scheduler.abort("a", 0.0) is item
    assert (item.status, item.finish_reason) == (RequestStatus.FINISHED, "abort")
    assert kv.num_free_blocks == 64
    assert not kv.holds_blocks("a")
    kv.check()
    assert scheduler.abort("a", 0.0) is None
    for step in steps:
        assert scheduler.update(step, [7] * len(step.sampling), 0.0) == []
    assert not scheduler.has_work


def test_abort_of_a_swapped_request_frees_swap_space():
    scheduler, kv, _, second, _ = crowded("swap")
    scheduler.abort("b", 0.0)
    assert kv.swap_allocator.num_used == 0
    assert second.finish_reason == "abort"
    kv.check()


def test_id_used_again_while_the_old_token_is_in_flight():
    scheduler, _ = make()
    old, new = request("a", 6), request("a", 5)
    add(scheduler, old)
    step = scheduler.schedule(0.0)
    scheduler.abort("a", 0.0)
    add(scheduler, new)
    following = scheduler.schedule(0.0)
    assert scheduler.update(step, [7], 0.0) == []
    assert scheduler.update(following, [8], 0.0) == [TokenUpdate(new, 8, False)]
    assert not scheduler.finish(old, "stop", None, 0.0)


def test_deadlines():
    scheduler, kv = make(request_timeout_s=10.0)
    waiting_forever = request("a", 6, deadline_s=3.0)
    default = request("b", 6)
    scheduler.add(waiting_forever, 1.0)
    scheduler.add(default, 1.0)
    assert default.deadline_s == 11.0
    assert scheduler.schedule(2.9).expired == ()
    step = scheduler.schedule(3.0)
    assert step.expired == (waiting_forever,)
    assert waiting_forever.finish_reason == "error"
    assert decodes(step) == ["b"]
    assert not kv.holds_blocks("a")
    scheduler.abort("b", 4.0)
    assert default.finish_reason == "abort"


def test_finished_requests_do_not_expire():
    scheduler, _ = make()
    item = request("a", 6, max_tokens=1, deadline_s=3.0)
    add(scheduler, item)
    run_step(scheduler)
    assert scheduler.schedule(5.0).expired == ()
    assert item.finish_reason == "length"


def test_ended_requests_do_not_pile_up_until_their_deadline():
    scheduler, _ = make()
    for index in range(300):
        add(scheduler, request(str(index), 6, deadline_s=1e9))
        scheduler.abort(str(index), 0.0)
    assert len(scheduler._deadlines._heap) < 100


def test_fail_all_ends_everything_and_trusts_nothing():
    scheduler, kv, first, second, _ = crowded("swap")
    waiting = request("c", 6)
    add(scheduler, waiting)
    scheduler.schedule(0.0)
    assert set(scheduler.fail_all(0.0)) == {first, second, waiting}
    assert {item.finish_reason for item in (first, second, waiting)} == {"error"}
    assert not scheduler.has_work
    assert kv.num_cached_blocks == 0
    assert kv.allocator.num_free == 8
    assert kv.swap_allocator.num_used == 0
    add(scheduler, request("d", 6, max_tokens=1))
    run_step(scheduler)
    assert not scheduler.has_work


# Figures


def test_load():
    scheduler, _ = make(num_blocks=20, max_num_seqs=2)
    add(scheduler, *(request(name, 16, max_tokens=4) for name in "abc"))
    step = scheduler.schedule(0.0)
    assert step.num_tokens == 32
    load = scheduler.load()
    assert (load.num_requests_running, load.num_requests_waiting) == (2, 1)
    assert load.num_waiting_tokens == 16
    assert (load.num_blocks, load.num_free_blocks) == (20, 12)
    assert load.kv_cache_usage == pytest.approx(0.4)
    assert load.token_budget_used == 1.0
    assert load.fragmentation == 0
    assert scheduler.get("a") is step.prefills[0].request
    assert scheduler.get("zz") is None


def test_swap_runs_are_aligned():
    *_, step = crowded("auto")
    assert all(isinstance(run, BlockRun) for run in step.swap_out)
    assert len(step.swap_out) <= 2


def test_imports_no_jax():
    import subprocess
    import sys

    code = (
        "import sys, flowkv_jax.engine.scheduler, flowkv_jax.kv_cache.manager, transfer.alignment;"
        "bad = {'jax', 'jaxlib', 'flax'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
