"""What is refused, and what has to wait.

Refused are impossible options, requests that could never run, and requests too many. Whoever comes
to run needs a seat and blocks, and waits for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flowkv_jax.checks import bad_value, check_int, check_real
from flowkv_jax.config import SchedulerConfig
from flowkv_jax.engine.queues import LiveRequests, RequestQueue
from flowkv_jax.engine.steps_under_way import StepsUnderWay
from flowkv_jax.errors import MaxQueuedTokensError, QueueOverflowError, ValidationError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request

MAX_REQUEST_ID_CHARACTERS = 512
MAX_CACHE_SALT_CHARACTERS = 1024
"""Nodes are told both, and take messages of bounded fields only (`cluster.sequence_wire`)."""

_INT32 = (-(2**31), 2**31 - 1)
_RESERVED_SHARE = 100  # 1/100 of the pool


def check_options(request_id: Any, priority: Any, cache_salt: Any, timeout: Any) -> None:
    """Check what a caller says of a request beside its prompt and its sampling parameters.

    Raises:
        ValidationError: naming the parameter and its value.
    """
    if request_id is not None:
        _check_text("request_id", request_id, MAX_REQUEST_ID_CHARACTERS)
        if not request_id:
            raise bad_value("request_id", request_id, "must be non-empty text")
    check_int("priority", priority, *_INT32)
    if cache_salt is not None:
        _check_text("cache_salt", cache_salt, MAX_CACHE_SALT_CHARACTERS)
    if timeout is not None:
        check_real("timeout", timeout)
        if timeout <= 0:
            raise bad_value("timeout", timeout, "must be positive (seconds)")


def _check_text(name: str, value: Any, most: int) -> None:
    if not isinstance(value, str):
        raise bad_value(name, value, "must be text")
    if len(value) > most:
        raise bad_value(name, value, f"has {len(value)} characters; at most {most}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad_value(name, value, "holds half of a surrogate pair") from error


def require_fit(request: Request, token_limit: int, kv: KVCacheManager, max_model_len: int) -> None:
    """Refuse what could not reach `token_limit` tokens even alone in the pool.

    The last token is sampled and never fed, so it needs no room.

    Raises:
        ValidationError: naming the parameter, its value and the bound.
    """
    num_prompt_tokens = request.num_prompt_tokens
    if num_prompt_tokens == 0:
        raise ValidationError("prompt is empty", parameter="prompt_token_ids", value=[])
    if request.max_total_tokens > max_model_len:
        raise ValidationError(
            f"max_total_tokens={request.max_total_tokens} exceeds {max_model_len=}",
            parameter="max_total_tokens",
            value=request.max_total_tokens,
        )
    if num_prompt_tokens >= request.max_total_tokens:
        raise ValidationError(
            f"prompt of {num_prompt_tokens} tokens leaves no room for output: prompt plus output "
            f"may have {request.max_total_tokens} tokens; shorten the prompt",
            parameter="prompt_token_ids",
            value=num_prompt_tokens,
        )
    if request.num_output_tokens and request.num_tokens >= token_limit:
        raise ValidationError(
            f"{request.num_output_tokens} known output tokens after a prompt of "
            f"{num_prompt_tokens} leave no room for more: prompt plus output may have "
            f"{token_limit} tokens",
            parameter="known_output_token_ids",
            value=request.num_output_tokens,
        )
    num_blocks = kv.blocks_for(token_limit - 1)
    if num_blocks > kv.num_blocks:
        raise ValidationError(
            f"prompt of {num_prompt_tokens} tokens may grow to {token_limit} tokens, which need "
            f"{num_blocks} KV blocks of {kv.block_size} tokens; the pool has {kv.num_blocks}; "
            "lower max_tokens, shorten the prompt, or raise num_blocks",
            parameter="max_tokens",
            value=request.sampling_params.max_tokens,
        )


def require_queue_room(request: Request, waiting: RequestQueue, config: SchedulerConfig) -> None:
    """Refuse what would make the queue longer than configured.

    Raises:
        QueueOverflowError: by requests.
        MaxQueuedTokensError: by prompt tokens. A prompt longer than the bound is let into an empty
            queue: trying again later would not help it.
    """
    num_waiting, waiting_tokens = len(waiting), waiting.num_prompt_tokens
    if num_waiting >= config.max_waiting_requests:
        raise QueueOverflowError(
            f"{num_waiting} requests wait, max_waiting_requests={config.max_waiting_requests}; "
            "try again later"
        )
    bound = config.max_waiting_tokens
    if bound is not None and num_waiting and waiting_tokens + request.num_prompt_tokens > bound:
        raise MaxQueuedTokensError(
            f"{waiting_tokens} prompt tokens wait and this request has "
            f"{request.num_prompt_tokens}, max_waiting_tokens={bound}; try again later"
        )


class Reserved(NamedTuple):
    """The request has blocks for K/V that another node sends.

    `num_reused_tokens` of them, in whole blocks from position 0 on, are here already and need not
    be sent; those blocks are shared and must not be written.
    """

    num_reused_tokens: int


class Deferred(NamedTuple):
    """There is no room now, for a reason fit to be shown. Nothing has changed; ask again later."""

    reason: str


Standing = tuple[int, ...]
"""See `Room.standing`."""


class Room:
    """Seats and blocks for those who come to run: admitted, resumed, kept, or received.

    A seat is one of `max_num_seqs`: what runs has one, and what is being received holds one, so
    that it can run as soon as it has arrived. What is being sent has none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        live: LiveRequests,
        steps: StepsUnderWay,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._kv = kv
        self._live = live
        self._steps = steps

    @property
    def num_seated(self) -> int:
        return self._live.num_running + len(self._live.receiving)

    def has_seat(self) -> bool:
        return self.num_seated < self._max_num_seqs

    def growth_reserve(self) -> int:
        """Blocks a newcomer must leave free: one for each seat taken, and 1 % of the pool.

        Nothing when all seats are free, so that whatever `add` accepted can be admitted.
        """
        num_seated = self.num_seated
        return num_seated + self._kv.num_blocks // _RESERVED_SHARE if num_seated else 0

    @property
    def standing(self) -> Standing:
        """What `reserve` goes by, beside the request and what is cached: as long as it stays the
        same there is no point in asking again."""
        return (
            self.num_seated,
            len(self._live.swapped),
            self._has_given_up_blocks,
            self._steps.is_swapping,
            len(self._steps.left_blocks),
            self._kv.num_free_blocks,
        )

    @property
    def _has_given_up_blocks(self) -> bool:
        waiting = self._live.waiting.items
        return any(live.request.scheduled_s is not None for live in waiting)

    def reserve(self, request: Request, num_tokens: int) -> Reserved | Deferred:
        """Blocks for positions [0, num_tokens) of a request whose K/V another node sends."""
        if not self.has_seat():
            return Deferred(f"no seat: {self.num_seated} of {self._max_num_seqs} running")
        # They hold swap space, or have given up blocks to others: an early reservation must not
        # take what they need to go on.
        if self._live.swapped.items:
            return Deferred("swapped requests wait")
        if self._has_given_up_blocks:
            return Deferred("requests that gave up their blocks wait")
        # The copies may be of blocks that were given up at once and are free by now.
        if self._steps.is_swapping:
            return Deferred("a step that swaps is under way")
        reserve, avoid = self.growth_reserve(), self._steps.left_blocks
        num_reused = self._kv.reserve(request, num_tokens, reserve_blocks=reserve, avoid=avoid)
        if num_reused is None:
            needed = self._kv.blocks_for(num_tokens)
            free = self._kv.num_free_blocks - reserve - len(avoid)
            return Deferred(f"no blocks: needs {needed}, {max(free, 0)} free beside the reserve")
        return Reserved(num_reused)
