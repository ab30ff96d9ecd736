"""What clients send, as structures. `/openapi.json` is made from the same.

JSON types are not coerced: "1" is no number and 1 no truth. Null means "left out" in every field,
as OpenAI's client libraries send it. Bounds that a schema can say are said here; the others are
`sampling`'s, `prompts`' and the engine's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from flowkv_jax.rpc.limits import MAX_MESSAGES, MAX_REQUEST_ID_CHARACTERS
from flowkv_jax.sampling_params import (
    LOGIT_BIAS_LIMIT,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_PROMPTS = 256
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 18
MAX_TEMPLATE_VARIABLES = 32
MAX_TEMPLATE_VARIABLES_BYTES = 1 << 16
MAX_CHOICES = 1024
MAX_TOOL_NAME_CHARACTERS = 128

_TokenId = Annotated[int, Meta(ge=0)]
_Ids = Annotated[list[_TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
_Stop = str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)]
_N = Annotated[int, Meta(ge=1, le=MAX_N)]
_Bias = Annotated[
    dict[str, Annotated[float, Meta(ge=-LOGIT_BIAS_LIMIT, le=LOGIT_BIAS_LIMIT)]],
    Meta(max_length=MAX_LOGIT_BIAS_ENTRIES),
]
_CacheSalt = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
_RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARACTERS)]
_ToolName = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_./:-]{{1,{MAX_TOOL_NAME_CHARACTERS}}}$")]

_Prompts = Annotated[
    list[str | _TokenId | list[_TokenId]],
    Meta(
        min_length=1,
        # One kind of list only: `prompts` tells which, as the type cannot.
        extra_json_schema={
            "anyOf": [
                {"items": {"type": "string"}, "maxItems": MAX_PROMPTS},
                {"items": {"type": "integer", "minimum": 0}},
                {
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "maxItems": MAX_PROMPTS,
                },
            ]
        },
    ),
]
_StructuredOutputs = Annotated[
    dict[str, Any],
    Meta(
        description="What the answer must match: exactly one of these.",
        min_length=1,
        extra_json_schema={
            "properties": {
                "json": {"type": ["object", "string", "boolean"]},
                "regex": {"type": "string", "minLength": 1},
                "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "grammar": {"type": "string", "minLength": 1},
                "json_object": {"const": True},
            }
        },
    ),
]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """How a stream counts tokens.

    Attributes:
        include_usage: one more chunk before [DONE], with no choices and the usage.
        continuous_usage_stats: the usage so far in every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, kw_only=True):
    """A named JSON Schema. `strict` is accepted: answers always follow the schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """`json_schema` is given exactly with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationFields(Struct, frozen=True, kw_only=True):
    """What both endpoints take; `SamplingParams` says what most of it means.

    Attributes:
        model: a served name; left out, the only one.
        max_completion_tokens: wins over `max_tokens`.
        cache_salt: share cached prompt beginnings only with requests of the same salt.
        kv_transfer_params: for a hand-off that an outside router drives.
        request_id: names the request, for aborting and tracing.
        return_token_ids: token ids beside the text.
        return_tokens_as_token_ids: tokens in log-probabilities are spelt "token_id:17".
    """

    model: str | None = None
    n: _N | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: _Bias | None = None
    allowed_token_ids: Annotated[list[_TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    seed: int | None = None
    stop: _Stop | None = None
    stop_token_ids: _Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: _StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: _CacheSalt | None = None
    kv_transfer_params: dict[str, Any] | None = None
    request_id: _RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/completions`.

    Attributes:
        prompt: text, token ids, or a list of texts or of lists of token ids; each gets `n` choices.
        logprobs: alternatives a token; 0 for the token itself alone.
        echo: the answer begins with the prompt. With max_tokens=0 the prompt is only scored.
        best_of: accepted when it equals `n`.
    """

    prompt: str | _Prompts
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    best_of: int | None = None


class TextPart(Struct, frozen=True, kw_only=True):
    """A part of a message. Only text is served."""

    type: Literal["text"]
    text: str


class CalledFunction(Struct, frozen=True, kw_only=True):
    """A call as the model made it; `arguments` is JSON text."""

    name: _ToolName
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call in a message of the assistant's."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One turn. `content` may be left out of an assistant's message with tool calls."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    """A function the model may call; `parameters` is a JSON Schema."""

    name: _ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct, frozen=True, kw_only=True):
    name: _ToolName


class NamedToolChoice(Struct, frozen=True, kw_only=True):
    """This function is to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatCompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`.

    Attributes:
        logprobs: report the log-probability of every token.
        top_logprobs: alternatives a token; needs `logprobs`.
        chat_template_kwargs: more names for the model's chat template.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
