"""Chat templates: Jinja programs that come inside model files and spell a conversation as a prompt.

A template is written by whoever made the checkpoint, so it runs in `template_sandbox`. The names it
finds are those of the transformers library: `messages`, `add_generation_prompt`, `bos_token`,
`eos_token`, `raise_exception`, `strftime_now`, the filter `tojson`, and what the caller passes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from flowkv_jax.errors import ValidationError
from flowkv_jax.template_sandbox import BudgetError, TemplateRefusal, compile_template

MAX_TEMPLATE_CHARS = 1 << 18
MAX_OUTPUT_CHARS = 1 << 23
_MAX_VALUE_DEPTH = 32

_RESERVED_NAMES = frozenset(
    {"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
    | {"strftime_now", "range", "namespace", "dict"}
)


class ChatTemplate:
    """A compiled template. Rendering is safe from several threads.

    Args:
        source: the Jinja text.
        now: what `strftime_now` reads.

    Raises:
        ValidationError: it is too long or not valid Jinja; the message names the line.
    """

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValidationError(
                f"chat template of {len(source)} characters exceeds {MAX_TEMPLATE_CHARS}",
                parameter="chat_template",
            )
        try:
            self._template = compile_template(source, now)
        except jinja2.TemplateSyntaxError as error:
            raise ValidationError(
                f"chat template line {error.lineno}: {error.message}", parameter="chat_template"
            ) from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise ValidationError(
                "chat template cannot be compiled: it nests too deeply", parameter="chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        bos_token: str | None = None,
        eos_token: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: see `checked_messages`.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: more names for the template (`tools`, for one); plain JSON values.

        Raises:
            ValidationError: a message or variable is malformed, or the template refuses the
                conversation, fails, or exceeds its budget; the message names the line.
        """
        context = self._template.new_context(
            {
                **_checked_variables(variables or {}),
                "messages": checked_messages(messages),
                "add_generation_prompt": add_generation_prompt,
                "bos_token": bos_token or "",
                "eos_token": eos_token or "",
            }
        )
        pieces, length = [], 0
        try:
            for piece in self._template.root_render_func(context):
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise BudgetError(f"its output exceeds {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except TemplateRefusal as error:
            raise ValidationError(
                f"the chat template refuses this conversation: {error}", parameter="messages"
            ) from error
        except Exception as error:
            raise ValidationError(
                f"chat template{self._line_of(error)}: {str(error) or type(error).__name__}",
                parameter="chat_template",
            ) from error
        return "".join(pieces)

    def _line_of(self, error: Exception) -> str:
        """Where in the template an error came from: its innermost frame there, if it has any."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == "<template>" and frame.lineno is not None
        ]
        return f" line {self._template.get_corresponding_lineno(lines[-1])}" if lines else ""


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, with content as one string.

    A message is a mapping with a `role` (a word) and `content`: a string, or a list of parts
    `{"type": "text", "text": ...}`, which are joined by newlines. An assistant message with
    `tool_calls` may have no content. Further keys are passed on.

    Raises:
        ValidationError: it is anything else; `parameter` is like "messages[2].content".
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValidationError(
            f"messages must be a list of messages, got {type(messages).__name__}",
            parameter="messages",
        )
    if not messages:
        raise ValidationError("messages is empty; give at least one", parameter="messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValidationError(
            f"{where} must be a mapping with role and content, got {type(message).__name__}",
            parameter=where,
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValidationError(
            f"{where}.role={role!r:.100} must be a word such as 'user'", parameter=f"{where}.role"
        )
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(
            _text_of_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        raise ValidationError(
            f"{where}.content={content!r:.100} must be a string or a list of text parts",
            parameter=f"{where}.content",
        )
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    return {"role": role, "content": content, **_plain(extra, where)}


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValidationError(
        f'{where}={part!r:.100} is not a text part; only {{"type": "text", "text": ...}} is served',
        parameter=where,
    )


def _checked_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _RESERVED_NAMES:
            raise ValidationError(f"chat template variable {name!r} is reserved", parameter=name)
    return {name: _plain(value, name) for name, value in variables.items()}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy made of JSON values alone: no other object reaches a template."""
    if depth > _MAX_VALUE_DEPTH:
        raise ValidationError(f"{where} nests over {_MAX_VALUE_DEPTH} deep", parameter=where)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise ValidationError(
        f"{where}: a {type(value).__name__} is not a plain JSON value", parameter=where, value=value
    )
