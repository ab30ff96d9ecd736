"""The request's life: positions and legal moves."""

import itertools

import pytest

from flowkv_jax.request import LEGAL_MOVES, Request, RequestStatus
from flowkv_jax.sampling_params import SamplingParams


def make_request() -> Request:
    return Request("r", (1, 2, 3), SamplingParams(), arrival_s=0.0, max_total_tokens=8, seed=0)


def test_tokens_are_prompt_plus_output():
    request = make_request()
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    request.token_ids.extend([7, 8])
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 5, 2)
    assert request.output_token_ids == [7, 8]
    assert request.prompt_token_ids == (1, 2, 3)


def test_output_known_at_birth_is_output():
    request = Request(
        "r",
        (1, 2, 3),
        SamplingParams(),
        arrival_s=0.0,
        max_total_tokens=8,
        seed=0,
        known_output_token_ids=(7, 8),
    )
    assert request.token_ids == [1, 2, 3, 7, 8]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 5, 2)
    request.token_ids.append(9)
    assert request.output_token_ids == [7, 8, 9]


def test_requests_are_compared_by_identity():
    assert make_request() != make_request()


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestStatus, repeat=2)))
def test_only_legal_moves(old, new):
    request = make_request()
    request.status = old
    if (old, new) in LEGAL_MOVES:
        request.move_to(new)
        assert request.status is new
        assert request.is_finished == (new is RequestStatus.FINISHED)
    else:
        with pytest.raises(RuntimeError, match=f"r: illegal move {old.name} -> {new.name}"):
            request.move_to(new)


def test_a_hand_off_goes_one_way():
    into = {(old, new) for old, new in LEGAL_MOVES if new is RequestStatus.RECEIVING}
    assert into == {(RequestStatus.WAITING, RequestStatus.RECEIVING)}
    into = {(old, new) for old, new in LEGAL_MOVES if new is RequestStatus.SENDING}
    assert into == {(RequestStatus.RUNNING, RequestStatus.SENDING)}


def test_nothing_leaves_finished_and_everything_can_finish():
    assert not [move for move in LEGAL_MOVES if move[0] is RequestStatus.FINISHED]
    able = {old for old, new in LEGAL_MOVES if new is RequestStatus.FINISHED}
    assert able == set(RequestStatus) - {RequestStatus.FINISHED}
