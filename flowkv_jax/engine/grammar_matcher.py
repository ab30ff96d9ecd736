"""Where one sequence stands in its grammar."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import llguidance

from flowkv_jax.engine.grammar import Grammar, MaskRow, fill, shortened

_EVERYTHING = 0xFFFFFFFF
_NOTHING_LEFT = (
    "what allowed_token_ids, bad_words and logit_bias leave holds no token that the form allows"
)


class GrammarMatcher:
    """Follows the tokens of a sequence, and says which may come next. One owner at a time.

    Sequences of one grammar share the states of its lexer: masks met before cost microseconds. The
    number of states is bounded, so a sequence may find no room for another. It then compiles the
    grammar for itself alone and goes on. What still fails ends the sequence (`failure`).

    Args:
        grammar: may still be compiling; the first `fill` waits for it.
        renew: says that the shared one may be full, so that later sequences get a new one.

    Attributes:
        failure: why nothing more can be said of this sequence; None as long as all is well.
    """

    def __init__(self, grammar: Future[Grammar], renew: Callable[[], None]) -> None:
        self._grammar = grammar
        self._renew = renew
        self._state: llguidance.LLMatcher | None = None
        self._is_shared = True
        self._token_ids: list[int] = []
        self.failure: str | None = None

    @property
    def is_complete(self) -> bool:
        """The answer is whole, and nothing can follow. Known from the first `fill` on."""
        return self.failure is None and self._state is not None and self._state.is_stopped()

    def accept(self, token_id: int) -> None:
        """The next token of the sequence; one that the grammar does not allow is a failure. As the
        mask forbids it, it is sampled only where the request's other bounds forbid all others."""
        self._token_ids.append(token_id)
        if self._state is None or self._state.try_consume_tokens([token_id]) == 1:
            return
        if self._state.is_error():
            self._begin_alone()
        elif self.failure is None:
            self.failure = _NOTHING_LEFT

    def fill(self, row: MaskRow) -> None:
        """Write the tokens that may follow: uint32 [ceil(V / 32)], a bit each, lowest first.

        After a failure every token may, for whatever is sampled is of no use.
        """
        if self._state is None:
            self._begin()
        if self._state is not None and self.failure is None:
            fill(self._state, row)
            if self._state.is_error():
                self._begin_alone()
                fill(self._state, row)
                self._note_error()
            row &= self._grammar.result().vocabulary.may_pass
            if self.failure is None and not row.any():
                self.failure = "the grammar leaves no token that may be sampled"
        if self.failure is not None:
            row[:] = _EVERYTHING

    def _begin(self) -> None:
        error = self._grammar.exception()
        if error is not None:
            self.failure = str(error)
            return
        self._state = self._grammar.result().start()
        if self._token_ids and not self._state.consume_tokens(self._token_ids):
            self._begin_alone()

    def _begin_alone(self) -> None:
        """Compile anew and follow all tokens again."""
        if self._is_shared:
            self._renew()
            self._is_shared = False
            self._state = self._grammar.result().compile()
            self._state.consume_tokens(self._token_ids)
        self._note_error()

    def _note_error(self) -> None:
        if self._state is not None and self._state.is_error():
            self.failure = shortened(self._state.get_error())
