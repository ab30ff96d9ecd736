"""Merging of deltas, pure: however a stream is cut into messages, it says the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from flowkv_jax.rpc.merge import OutputMerger


def delta(token: int, index: int = 0, *, finished: bool = False) -> RequestOutput:
    answer = CompletionOutput(
        index=index,
        text=f"<{token}>",
        token_ids=[token],
        delta_text=f"<{token}>",
        delta_token_ids=[token],
        cumulative_logprob=-float(token),
        logprobs=[{token: Logprob(-1.0, 1)}],
        finish_reason="stop" if finished else None,
        stop_reason=token if finished else None,
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1, 2],
        outputs=[answer],
        finished=finished,
        num_cached_tokens=token,
        metrics=RequestMetrics(0.0, 0.0, num_preemptions=token),
    )


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=30),
)
def test_any_cut_says_the_same(arrivals: list[tuple[int, bool]]) -> None:
    """Each arrival is the index of its answer, and whether a message is taken after it."""
    merger = OutputMerger()
    messages = []
    for token, (index, is_taken) in enumerate(arrivals):
        merger.add(delta(token, index))
        if is_taken:
            messages.append(merger.take())
            assert merger.is_empty
    if not merger.is_empty:
        messages.append(merger.take())
    for index in range(3):
        expected = [token for token, arrival in enumerate(arrivals) if arrival[0] == index]
        answers = [a for m in messages for a in m.outputs if a.index == index]
        assert [i for a in answers for i in a.token_ids] == expected
        assert "".join(a.text for a in answers) == "".join(f"<{token}>" for token in expected)
        assert [i for a in answers for p in a.logprobs or [] for i in p] == expected
        assert all(a.delta_text == a.text for a in answers)
        assert all(a.delta_token_ids == a.token_ids for a in answers)
        if expected:
            assert answers[-1].cumulative_logprob == -expected[-1]
    assert messages[-1].num_cached_tokens == len(arrivals) - 1


def test_merged_keeps_what_it_shows() -> None:
    merger = OutputMerger()
    merger.add(delta(1))
    first = merger.merged()
    merger.add(delta(2, finished=True))
    assert first.outputs[0].token_ids == [1]
    both = merger.merged()
    assert (both.outputs[0].token_ids, both.outputs[0].text) == ([1, 2], "<1><2>")
    assert (both.outputs[0].finish_reason, both.outputs[0].stop_reason) == ("stop", 2)
    assert both.finished
    assert merger.take() == both


def test_nothing_to_take() -> None:
    with pytest.raises(RuntimeError):
        OutputMerger().take()
