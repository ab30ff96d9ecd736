"""Log-probabilities in OpenAI's two shapes."""

import math

from flowkv_jax.http.openai.logprobs import chat_logprobs, completion_logprobs
from flowkv_jax.outputs import Logprob
from tests.fake_engine import FakeTokenizer

HALF, OTHER_HALF = 0xE2, 0xE3
POSITION = {
    HALF: Logprob(-2.0, 2, "\ufffd"),
    OTHER_HALF: Logprob(-0.5, 1, "\ufffd"),
    65: Logprob(-math.inf, 3, "é"),
}


class SilentTokenizer(FakeTokenizer):
    has_token_bytes = False


def test_a_token_that_is_no_whole_text_has_its_bytes() -> None:
    for tokenizer, half in ((FakeTokenizer(), [HALF]), (SilentTokenizer(), None)):
        (entry,) = chat_logprobs(
            [HALF], [POSITION], num_alternatives=3, as_ids=False, tokenizer=tokenizer
        ).content
        assert (entry.token, entry.logprob, entry.bytes) == ("\ufffd", -2.0, half)
        assert [one.logprob for one in entry.top_logprobs] == [-0.5, -2.0, -9999.0]
        assert entry.top_logprobs[2].bytes == list("é".encode())


def test_alternatives_are_the_likeliest_ones() -> None:
    (entry,) = chat_logprobs(
        [HALF], [POSITION], num_alternatives=1, as_ids=True, tokenizer=FakeTokenizer()
    ).content
    assert [one.token for one in entry.top_logprobs] == [f"token_id:{OTHER_HALF}"]


def test_tokens_of_one_text_count_as_their_likeliest() -> None:
    """A client that looks whether the token was the likeliest compares with this maximum."""
    shown = completion_logprobs(
        [7, HALF],
        [None, POSITION],
        first_offset=5,
        as_ids=False,
        spell=lambda token_id: f"<{token_id}>",
    )
    assert shown.tokens == ["<7>", "\ufffd"]
    assert shown.text_offset == [5, 8]
    assert shown.token_logprobs == [None, -2.0]
    assert shown.top_logprobs == [None, {"\ufffd": -0.5, "é": -9999.0}]
