"""Text, stop strings, logprobs and the n answers, with a byte tokenizer that holds back UTF-8."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.engine.output_processor import LogprobsRow, RequestOutputState
from flowkv_jax.engine.stop_strings import StopStringFinder
from flowkv_jax.outputs import Logprob
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams

EOS = 256


class ByteDecoder:
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id):
        if token_id == EOS:
            return None
        return self._decoder.decode(bytes([token_id])) or None

    def flush(self):
        return self._decoder.decode(b"", final=True)


class ByteDetokenizer:
    def decode_stream(self, skip_special_tokens):
        assert skip_special_tokens
        return ByteDecoder()

    def token_text(self, token_id):
        return chr(token_id)


def new_state(prompt="Q:", **params):
    return RequestOutputState(
        "r",
        SamplingParams(**params),
        prompt=prompt,
        prompt_token_ids=list((prompt or "").encode()),
        detokenizer=ByteDetokenizer(),
    )


def ids(text):
    return list(text.encode())


def stream(state, text, finish_reason="length", index=0):
    """Feed one token at a time; returns every output."""
    outputs = []
    tokens = ids(text)
    for i, token in enumerate(tokens):
        reason = finish_reason if i == len(tokens) - 1 else None
        state.append(index, [token], finish_reason=reason)
        output = state.take_output()
        if output is not None:
            outputs.append(output)
    return outputs


def test_cumulative_outputs_grow_and_deltas_join_to_them():
    outputs = stream(new_state(), "héllo")
    assert [output.outputs[0].text for output in outputs] == [
        "h",
        "h",
        "hé",
        "hél",
        "héll",
        "héllo",
    ]
    assert "".join(output.outputs[0].delta_text for output in outputs) == "héllo"
    assert sum((output.outputs[0].delta_token_ids for output in outputs), []) == ids("héllo")
    assert outputs[-1].outputs[0].token_ids == ids("héllo")
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].prompt == "Q:"


def test_outputs_given_out_do_not_change():
    state = new_state()
    state.append(0, ids("a"))
    first = state.take_output()
    state.append(0, ids("b"))
    assert first.outputs[0].token_ids == ids("a")


def test_delta_outputs_hold_only_news():
    outputs = stream(new_state(output_kind=RequestOutputKind.DELTA), "abc")
    assert [output.outputs[0].text for output in outputs] == ["a", "b", "c"]
    assert [output.outputs[0].token_ids for output in outputs] == [[97], [98], [99]]


def test_final_only_tells_everything_once():
    outputs = stream(new_state(output_kind=RequestOutputKind.FINAL_ONLY), "abc")
    assert len(outputs) == 1
    assert outputs[0].outputs[0].text == outputs[0].outputs[0].delta_text == "abc"


def test_nothing_new_is_no_output():
    state = new_state()
    assert state.take_output() is None
    state.append(0, ids("a"), finish_reason="length")
    assert state.take_output().finished
    assert state.take_output() is None


def test_news_collect_for_a_slow_reader():
    state = new_state(output_kind=RequestOutputKind.DELTA)
    state.append(0, ids("ab"))
    state.append(0, ids("cd"))
    assert state.take_output().outputs[0].delta_text == "abcd"


def test_stop_string_over_several_tokens_is_never_shown():
    state = new_state(stop=["STOP"])
    shown, stopped = [], None
    for token in ids("one STOP two"):
        stopped = state.append(0, [token])
        output = state.take_output()
        shown.append(output.outputs[0].text)
        if stopped:
            break
    assert stopped == "STOP"
    assert shown[-1] == "one "
    assert not any("S" in text for text in shown)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
    assert output.finished
    assert answer.token_ids == ids("one STOP")


def test_tokens_behind_a_stop_string_are_dropped():
    state = new_state(stop="b")
    assert state.append(0, ids("abcd"), finish_reason="length") == "b"
    assert state.append(0, ids("ef")) is None
    output = state.take_output()
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("a", ids("ab"), "b")


def test_stop_string_can_stay_in_the_text():
    state = new_state(stop="bc", include_stop_str_in_output=True)
    state.append(0, ids("abcd"))
    assert state.take_output().outputs[0].text == "abc"


def test_held_text_is_released_at_the_end():
    outputs = stream(new_state(stop=["STOP"]), "an STO")
    assert outputs[-2].outputs[0].text == "an"
    assert outputs[-1].outputs[0].text == "an STO"
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_stop_strings_wait_for_min_tokens():
    state = new_state(stop=["ab"], min_tokens=4)
    assert state.append(0, ids("abx")) is None
    assert state.append(0, ids("yab")) == "ab"
    assert state.take_output().outputs[0].text == "abxy"


def test_stop_token_has_no_text_unless_asked_for():
    def finish(**params):
        state = new_state(stop_token_ids=[ord("!")], **params)
        state.append(0, ids("hi!"), finish_reason="stop", stop_reason=ord("!"))
        return state.take_output().outputs[0]

    assert finish().text == "hi"
    assert finish().token_ids == ids("hi!")
    assert finish().stop_reason == ord("!")
    assert finish(include_stop_str_in_output=True).text == "hi!"


def test_incomplete_character_becomes_replacement_text():
    state = new_state()
    state.append(0, [*ids("ok"), 0xC3])
    assert state.take_output().outputs[0].text == "ok"
    state.append(0, [EOS], finish_reason="stop")
    output = state.take_output().outputs[0]
    assert (output.text, output.delta_text) == ("ok\ufffd", "\ufffd")


def test_abort_ends_without_tokens():
    state = new_state(stop=["xyz"])
    state.append(0, ids("abx"))
    state.take_output()
    state.append(0, [], finish_reason="abort")
    output = state.take_output()
    assert output.finished
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abx", "abort")


def test_echo_puts_the_prompt_in_front():
    outputs = stream(new_state(echo=True, output_kind=RequestOutputKind.DELTA), "A")
    assert outputs[0].outputs[0].text == "Q:A"
    assert outputs[0].outputs[0].token_ids == ids("A")
    # A stop string inside the prompt is not the answer's.
    state = new_state(echo=True, stop="Q:")
    assert state.append(0, ids("A")) is None


def test_without_detokenizing_there_is_no_text():
    state = RequestOutputState(
        "r", SamplingParams(detokenize=False), prompt=None, prompt_token_ids=[1], detokenizer=None
    )
    state.append(0, [7, 8], finish_reason="length")
    answer = state.take_output().outputs[0]
    assert (answer.text, answer.token_ids) == ("", [7, 8])


def test_missing_parts_are_bugs_of_ours():
    with pytest.raises(RuntimeError, match="detokenizer"):
        RequestOutputState("r", SamplingParams(), prompt="", prompt_token_ids=[], detokenizer=None)
    with pytest.raises(RuntimeError, match="echo"):
        new_state(prompt=None, echo=True)
    with pytest.raises(RuntimeError, match="logprobs"):
        new_state(logprobs=1).append(0, [5])
    with pytest.raises(RuntimeError, match="prompt logprobs"):
        new_state().append_prompt_logprobs([1], [LogprobsRow(0, 1)])


def test_logprobs_hold_the_sampled_token_first():
    state = new_state(logprobs=2, output_kind=RequestOutputKind.DELTA)
    state.append(0, [100], logprobs=[LogprobsRow(-3.0, 9, [97, 98], [-0.5, -1.0])])
    first = state.take_output().outputs[0]
    assert list(first.logprobs[0]) == [100, 97, 98]
    assert first.logprobs[0][100] == Logprob(-3.0, 9, "d")
    assert first.logprobs[0][98] == Logprob(-1.0, 2, "b")
    state.append(0, [97], logprobs=[LogprobsRow(-0.5, 1, [97, 98], [-0.5, -1.0])])
    second = state.take_output().outputs[0]
    assert list(second.logprobs[0]) == [97, 98]
    assert len(second.logprobs) == 1
    assert second.cumulative_logprob == -3.5


def test_cumulative_logprobs_stop_with_the_text():
    state = new_state(logprobs=0, stop="b")
    state.append(0, ids("abc"), logprobs=[LogprobsRow(-1.0, 1)] * 3)
    answer = state.take_output().outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids) == 2
    assert answer.cumulative_logprob == -2.0


def test_prompt_logprobs_begin_with_none():
    state = new_state(prompt_logprobs=0)
    state.append_prompt_logprobs(ids(":"), [LogprobsRow(-2.0, 4)])
    state.append(0, ids("a"), finish_reason="length")
    assert state.take_output().prompt_logprobs == [None, {58: Logprob(-2.0, 4, ":")}]


def test_delta_tells_prompt_logprobs_once():
    state = new_state(prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    state.append_prompt_logprobs(ids(":"), [LogprobsRow(-2.0, 4)])
    outputs = stream(state, "ab")
    assert outputs[0].prompt_logprobs == [None, {58: Logprob(-2.0, 4, ":")}]
    assert outputs[1].prompt_logprobs is None


def test_answers_of_one_request_share_one_stream():
    state = new_state(n=3)
    state.append(0, ids("a"))
    state.append(2, ids("c"), finish_reason="length")
    output = state.take_output()
    assert [answer.text for answer in output.outputs] == ["a", "", "c"]
    assert not output.finished
    state.append(0, ids("A"), finish_reason="length")
    state.append(1, ids("b"), finish_reason="stop")
    output = state.take_output()
    assert [answer.text for answer in output.outputs] == ["aA", "", "c"]
    assert [answer.delta_text for answer in output.outputs] == ["A", "", ""]
    assert output.finished


def test_delta_tells_only_answers_with_news():
    state = new_state(n=3, output_kind=RequestOutputKind.DELTA)
    state.append(1, ids("b"), finish_reason="length")
    assert [answer.index for answer in state.take_output().outputs] == [1]
    state.append(0, ids("a"), finish_reason="length")
    state.append(2, ids("c"), finish_reason="length")
    output = state.take_output()
    assert [answer.index for answer in output.outputs] == [0, 2]
    assert output.finished


def test_final_only_waits_for_every_answer():
    state = new_state(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    state.append(0, ids("a"), finish_reason="length")
    assert state.take_output() is None
    state.append(1, ids("b"), finish_reason="length")
    assert [answer.text for answer in state.take_output().outputs] == ["a", "b"]


SMALL_TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(SMALL_TEXT, STOPS, st.data(), st.booleans())
def test_result_does_not_depend_on_where_pieces_are_cut(text, stops, data, include):
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    finder = StopStringFinder(stops, include_in_output=include)
    shown, found, rest = "", None, text
    while rest and found is None:
        size = data.draw(st.integers(1, len(rest)))
        released, found = finder.feed(rest[:size])
        shown, rest = shown + released, rest[size:]
    if not ends:
        assert found is None
        assert shown + finder.flush() == text
        return
    end, start, stop = min(ends)
    assert found == stop
    assert shown == text[: end if include else start]


@given(SMALL_TEXT, STOPS)
def test_no_beginning_of_a_stop_string_is_shown_early(text, stops):
    finder = StopStringFinder(stops)
    shown = ""
    for character in text:
        released, found = finder.feed(character)
        shown += released
        if found is not None:
            break
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    final = text[: min(matches)[1]] if matches else text
    assert final.startswith(shown)
