"""SamplingParams: errors that name the parameter, and the tokens that end an answer."""

import pytest

from dschat.config import UserError
from dschat.inference.protocol import SamplingParams


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1},
        {"n": 0},
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
    ],
)
def test_bad_parameters_are_named(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SamplingParams(**options)


def test_what_ends_an_answer():
    assert SamplingParams().end_ids((2, 3)) == {2, 3}
    assert SamplingParams(stop_token_ids=(7, 2)).end_ids((2,)) == {2, 7}
    assert SamplingParams(stop_token_ids=(7,), ignore_eos=True).end_ids((2,)) == {7}
