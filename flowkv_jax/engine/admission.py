"""What is refused: impossible options, requests that could never run, and requests too many."""

from __future__ import annotations

from typing import Any

from flowkv_jax.checks import bad_value, check_int, check_real
from flowkv_jax.config import SchedulerConfig
from flowkv_jax.engine.queues import RequestQueue
from flowkv_jax.errors import MaxQueuedTokensError, QueueOverflowError, ValidationError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request

_INT32 = (-(2**31), 2**31 - 1)


def check_options(request_id: Any, priority: Any, cache_salt: Any, timeout: Any) -> None:
    """Check what a caller says of a request beside its prompt and its sampling parameters.

    Raises:
        ValidationError: naming the parameter and its value.
    """
    if request_id is not None:
        _check_text("request_id", request_id)
        if not request_id:
            raise bad_value("request_id", request_id, "must be non-empty text")
    check_int("priority", priority, *_INT32)
    if cache_salt is not None:
        _check_text("cache_salt", cache_salt)
    if timeout is not None:
        check_real("timeout", timeout)
        if timeout <= 0:
            raise bad_value("timeout", timeout, "must be positive (seconds)")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise bad_value(name, value, "must be text")
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
