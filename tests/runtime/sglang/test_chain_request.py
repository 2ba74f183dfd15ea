"""A chain's request, and the steps that its answer is cut into."""

from __future__ import annotations

import json
from dataclasses import replace

from hedgerow_sglang.plugin_protocol import sampling_seed
from hedgerow_sglang.step_chain import CHAIN, ENDS, StepEnds
from runtime.sglang.chain_request import ChainLengths, chain_body, is_chain, take_chain
from runtime.sglang.step_request import StepRequest
from runtime.stop_strings import StopStringTables
from search.engine import Ahead, Branch, Sampling
from search.tree import Finish, step_seed

PIECES = (b"a", b"b", b"\n", b"\n\n", b"<end>")
END = 4
SAMPLING = Sampling(max_step_tokens=3)


def chain(steps: int = 4, room: int = 20) -> StepRequest:
    """A root's child, and what follows it."""
    ahead = Ahead(seed=7, path=(2,), children=1, room=room, steps=steps)
    branch = Branch(0, 2, (9, 9), step_seed(7, (2,)), min(3, room), 5, ahead)
    return StepRequest(branch, SAMPLING, StopStringTables(PIECES).of(("\n\n",)), frozenset({END}))


def answer(*tokens: int) -> dict:
    """As ``/generate`` gives it."""
    drawn = [[-1.0, token, None] for token in tokens]
    return {
        "meta_info": {
            "prompt_tokens": 2,
            "output_token_logprobs": drawn,
            "output_top_logprobs": [[one] for one in drawn],
        }
    }


def test_what_is_asked_for() -> None:
    """As much as has room, by the seeds of the steps to come; the first of a list says how they
    end, SGLang ends none."""
    ends = StepEnds.of(PIECES, [b"\n\n"])
    note = {"custom_params": {"hedgerow": "{}"}}
    body = chain_body(chain(2), 1, note, ends, most=99, first=True)
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["stop"], params["stop_token_ids"]) == (20, [], [END])
    asked = json.loads(params["custom_params"][CHAIN])
    seeds = [sampling_seed(step_seed(7, path)) for path in ((2,), (2, 0), (2, 0, 0))]
    assert (asked["seeds"], asked["most"], asked["ends"]) == (seeds, 3, ends.name)
    assert {"hedgerow", ENDS} <= params["custom_params"].keys()
    for most, limit in ((7, 7), (1, 3), (99, 20)):
        params = chain_body(chain(), 1, {}, ends, most=most, first=False)["sampling_params"]
        assert params["max_new_tokens"] == limit
        assert ENDS not in params["custom_params"]


def test_an_answer_is_cut_into_steps() -> None:
    """By stop, by length, by the model's end; each is what its round asks for."""
    first = chain()
    later = take_chain(first, answer(0, 3, 0, 1, 0, 1, END))
    assert (first.tokens, first.finish, first.logprob) == ([0, 3], Finish.STEP, -2.0)
    assert [(step.tokens, step.finish) for step in later] == [
        ([0, 1, 0], Finish.LENGTH),
        ([1, END], Finish.END),
    ]
    assert all(step.acknowledged for step in later)
    asked = Branch(5, 0, (9, 9, 0, 3), step_seed(7, (2, 0)), 3, 6)
    assert later[0].branch.draws_as(asked)
    assert later[1].key == ((9, 9, 0, 3, 0, 1, 0), step_seed(7, (2, 0, 0)))


def test_a_last_step_without_an_end_goes_on_later() -> None:
    """Its round goes on from what is there."""
    (part,) = take_chain(chain(), answer(0, 3, 0))
    assert (part.tokens, part.finish) == ([0], None)


def test_what_is_not_asked_for_is_dropped() -> None:
    """What comes after the last step, or beyond the room."""
    assert len(take_chain(chain(steps=1), answer(0, 3, 1, 3, 1, 3))) == 1
    (short,) = take_chain(chain(room=4), answer(0, 3, 0, 0))
    assert (short.branch.limit, short.finish) == (2, Finish.LENGTH)


def test_how_much_is_asked_for_at_once() -> None:
    """Three times the average, 256 at least: one long chain holds the others back no more."""
    lengths = ChainLengths()
    assert lengths.most == 256
    for tokens in (100, 100, 400):
        lengths.saw(tokens)
    assert lengths.most == 600


def test_which_steps_are_chains() -> None:
    """Those whose round says so, from their beginning."""
    begun = chain()
    begun.tokens.append(0)
    alone = StepRequest(replace(begun.branch, ahead=None), SAMPLING, begun.stops, frozenset({END}))
    assert [is_chain(one) for one in (chain(), chain(steps=0), begun, alone)] == [
        *(True, False, False, False)
    ]
