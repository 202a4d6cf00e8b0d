"""Prompts continued over several calls; each call stops when enough of them are complete."""

from families import PROMPTS, engine
from rank_threads import on_ranks

from dschat.inference import SamplingParams
from dschat.rlhf.rollout_policies import OpenPrompt, advance

SAMPLING = SamplingParams(max_new_tokens=16, n=3, seed=3)
NUMBERS = list(range(len(PROMPTS)))


def opened():
    return [OpenPrompt(ids) for ids in PROMPTS]


def complete(prompts):
    return [i for i, p in enumerate(prompts) if p.is_complete]


def test_what_is_due_is_completed(module_of):
    made = engine(module_of("llama"))
    for num_due in range(len(PROMPTS) + 1):
        prompts = opened()
        advance(made, prompts, SAMPLING, NUMBERS, wanted=1, num_due=num_due)
        assert all(p.is_complete for p in prompts[:num_due])
        assert len(complete(prompts)) >= 1


def test_nothing_runs_where_enough_is_complete(module_of):
    made, prompts = engine(module_of("llama")), opened()
    advance(made, prompts, SAMPLING, NUMBERS, wanted=0)
    assert made.stats.answer_tokens == 0
    assert prompts == opened()


def test_staleness_counts_from_the_first_token(module_of):
    """One slot: the second prompt has no token before the first is complete."""
    made, prompts = engine(module_of("llama"), max_num_seqs=1), opened()[:2]
    for wanted, staleness in ((1, [0, 0]), (2, [1, 0]), (2, [2, 1])):
        advance(made, prompts, SAMPLING, NUMBERS[:2], wanted)
        assert sorted((p.staleness for p in prompts), reverse=True) == staleness


def test_tensor_parallel_ranks_wait_for_each_other(module_of):
    module = module_of("llama")
    expected = engine(module).generate(PROMPTS, SAMPLING).token_ids
    wanted = [(2, 0), (1, 3)]

    def work(member):
        made = engine(module, group=member)
        mine = opened()[5 * member.rank :][: 5 - 2 * member.rank]
        numbers = [5 * member.rank + i for i in range(len(mine))]
        advance(made, mine, SAMPLING, numbers, *wanted[member.rank])
        return mine

    parts = on_ranks(2, work)
    for part, (number, num_due) in zip(parts, wanted, strict=True):
        assert len(complete(part)) >= number
        assert all(p.is_complete for p in part[:num_due])
    for i, prompt in enumerate(parts[0] + parts[1]):
        for answer, whole in zip(prompt.token_ids, expected[3 * i :], strict=False):
            assert whole[: len(answer)] == answer
