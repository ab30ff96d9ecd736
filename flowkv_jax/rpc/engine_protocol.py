"""What the front door asks of an engine. `flowkv_jax.Engine` offers it, and so do fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from flowkv_jax.kv_transfer.info import KVTransferInfo
from flowkv_jax.load import ModelInfo, NodeLoad
from flowkv_jax.metrics.serving_metrics import ServingMetrics
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.cluster_view import ClusterView
from flowkv_jax.sampling_params import SamplingParams

PromptInput = str | list[int]
Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": ..., "content": ...}`."""


class TokenizerLike(Protocol):
    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token(self) -> str | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @property
    def has_token_bytes(self) -> bool:
        """`token_bytes` is right for every token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text."""
        ...

    def to_json(self) -> str:
        """The text of a `tokenizer.json` that it could be read from."""
        ...


class ServingEngine(Protocol):
    """An engine as seen from the event loop.

    `async_generate` yields outputs whose `delta_*` fields say what is new, the last one with
    `finished=True`. It raises errors of `flowkv_jax.errors` before the first output or between two.
    Closing the iterator aborts the request and frees what it held.

    `kv_transfer_params` are a router's (see `flowkv_jax.kv_transfer`); what is to go to the next
    server comes back on the last output. They are refused with `UnprocessableError` where
    `kv_transfer_info` is None.
    """

    def async_generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    def render_chat(
        self, messages: Sequence[Message], template_variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """A conversation in the model's own template, as token ids. Takes milliseconds: not for an
        event loop's thread.

        Args:
            template_variables: more names for the template (`tools`, for one); plain JSON values.

        Raises:
            ValidationError: malformed messages or template.
            UnprocessableError: the model has no chat template.
        """
        ...

    def abort(self, request_id: str | Sequence[str]) -> int:
        """Abort live requests; unknown ids are passed over. Returns how many were aborted.

        May wait for a step to end, and may be called from any thread.
        """
        ...

    def get_tokenizer(self) -> TokenizerLike: ...

    @property
    def chat_template(self) -> str | None:
        """Jinja text of the template that chats are rendered with."""
        ...

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that brings no parameters: the model's own recommendations."""
        ...

    def get_loads(self) -> NodeLoad: ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once, at most, by all nodes together."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts. False if some are in use (they are forgotten once let go).

        May wait for a step to end, and may be called from any thread.
        """
        ...

    def start_profile(self, duration_s: float) -> None:
        """Have every process with a device record a profile, until `stop_profile` or for
        `duration_s`. Not for an event loop's thread.

        Raises:
            UnprocessableError: there is nowhere to write it, or one is being recorded.
        """
        ...

    def stop_profile(self) -> None:
        """Write the profiles; takes seconds. Not for an event loop's thread.

        Raises:
            UnprocessableError: none is being recorded.
        """
        ...

    def model_info(self) -> ModelInfo: ...

    @property
    def metrics(self) -> ServingMetrics:
        """What it tells Prometheus."""
        ...

    def kv_transfer_info(self) -> KVTransferInfo | None:
        """Its part in hand-offs between servers that a router drives; None where it has none."""
        ...

    @property
    def cluster(self) -> ClusterView | None:
        """Its nodes; None where there is nothing to show or to steer."""
        ...

    @property
    def is_healthy(self) -> bool:
        """False once the engine can serve no request any more."""
        ...
