"""How the served model writes calls: as the server is told, or as its chat template shows."""

from __future__ import annotations

import asyncio

from flowkv_jax.config import ToolCallParserName
from flowkv_jax.errors import FlowKVError, ValidationError
from flowkv_jax.http.openai.tools.calling import PROBE_TOOL, parser_evident_in
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.rpc.engine_protocol import ServingEngine


class ModelWay:
    """Looks at most once."""

    def __init__(self) -> None:
        self._evident: ToolCallParserName | None = None
        self._has_looked = False

    async def parser_name(self, surroundings: Surroundings) -> ToolCallParserName:
        """
        Raises:
            ValidationError: the server is told nothing, and the template shows nothing.
        """
        told = surroundings.config.tool_call_parser
        if told is not None:
            return told
        if not self._has_looked:
            self._evident = await asyncio.to_thread(_look, surroundings.engine)
            self._has_looked = True
        if self._evident is None:
            raise ValidationError(
                "tools with tool_choice=auto need a model whose chat template tells it how to call"
                " them, and this one's does not; start the server with --tool-call-parser, or give"
                " tool_choice=required or a function",
                parameter="tools",
            )
        return self._evident


def _look(engine: ServingEngine) -> ToolCallParserName | None:
    messages = [{"role": "user", "content": "Hello."}]
    try:
        rendered = engine.render_chat(messages, {"tools": [PROBE_TOOL]})
    except FlowKVError:
        return None
    return parser_evident_in(engine.get_tokenizer().decode(rendered, skip_special_tokens=False))
