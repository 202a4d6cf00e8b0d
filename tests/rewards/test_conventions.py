"""Reward functions as the documentation of TRL, OpenRLHF and verl has them, unchanged."""

import pytest
import torch
from others_rewards import scores_of

from dschat.config import UserError
from dschat.rewards.conventions import adapted


@pytest.mark.parametrize("pool", ["none", pytest.param("process", marks=pytest.mark.slow)])
def test_each_is_called_as_its_trainer_does(rewards, samples, others, pool):
    names = ("reward_func", "compute_score", "compute_scores")
    made = rewards(
        reward_fn=[f"{others}:{name}" for name in names],
        reward_args=["compute_score.bonus=0.5"],
        reward_pool=pool,
        reward_workers=1,
    )
    assert scores_of(made, samples(2, answer=["a0", "b"])) == [[1, 0], [1.5, 0.5], [1, 0]]
    verl = samples(
        2,
        data_source=["math", "math"],
        reward_model=[{"ground_truth": "a0"}, {"ground_truth": "b"}],
        extra_info=[{"split": "train"}, {"split": "train"}],
    )
    assert scores_of(made, verl)[1:] == [[1.5, 0.5], [1, 0]]


@pytest.mark.parametrize(("pool", "calls"), [("none", 1), ("thread", 2)])
def test_what_trls_functions_log_and_know_of_the_run(rewards, samples, others, pool, calls):
    made = rewards(
        reward_fn=[f"{others}:{name}" for name in ("shortness", "any_arguments", "own")],
        reward_pool=pool,
        reward_workers=calls,
    )
    given = samples(2)
    given.answers = ["four", "be"]
    for step in (0, 5):
        made.logs.trainer_state.global_step = step
        assert scores_of(made, given) == [[-4 - step, -2 - step], [step, step], [0, 0]]
        assert made.logged() == {"mean_length": 3.0, "calls": 3.0}
        assert made.logs.extra == {"length": [4, 2]}


def test_a_function_of_trl_that_takes_ids_alone(rewards, samples, others, caplog):
    with caplog.at_level("INFO", logger="dschat"):
        made = rewards(reward_fn=[f"{others}:by_ids"])
    assert "by_ids is called as TRL calls it" in caplog.text
    chats = samples(2)
    assert scores_of(made, chats) == [[0, 0]]
    chats.chats = [[{"role": "user", "content": prompt}] for prompt in chats.prompts]
    assert scores_of(made, chats) == [[1, 1]]
    assert made.logged() == {"calls": 1.0}


def test_queries_of_openrlhf_are_what_the_model_read_and_wrote(rewards, samples):
    """As its experience maker decodes them: with special tokens, the whole chat."""
    seen = []

    def reward_func(queries, prompts, labels):
        seen.extend(zip(queries, prompts, labels, strict=True))
        return [0.0] * len(queries)

    given = samples(4, label=list("wxyz"))
    given.decode = lambda ids: "".join(f"<{i}>" for i in ids)
    made = rewards([reward_func], reward_pool="thread", reward_workers=2)
    made.score(given.pick([0, 1]).joined([given.pick([0, 1]), given.pick([2, 3])])).result()
    pairs = zip(given.prompt_ids, given.answer_ids, "wxyz", strict=True)
    assert sorted(seen) == sorted((given.decode(p + a), given.decode(p), x) for p, a, x in pairs)


@pytest.mark.parametrize("more", ["", ", bonus=1.0", ", **kwargs"])
def test_a_function_of_openrlhf_may_take_more(more):
    function = eval(f"lambda queries, prompts, labels{more}: 0.0")
    assert adapted(function)[1] == "OpenRLHF"


def test_worker_processes_cannot_log(rewards, others):
    made = rewards(reward_fn=[f"{others}:shortness"], reward_pool="process", reward_workers=1)
    with pytest.raises(UserError, match="needs the column log_metric, .*give log_metric a default"):
        made.check_columns([])


def test_coroutines_of_any_convention_are_awaited(rewards, samples, others):
    made = rewards(reward_fn=[f"{others}:later_reward", f"{others}:Later"])
    assert made.overlaps
    given = samples(2, answer=["a0", "b"], extra_info=[{}, {"split": "train"}])
    assert scores_of(made, given) == [[1, 0], [1, 0]]


def test_which_convention_it_is_is_said(rewards, others, caplog):
    with caplog.at_level("INFO", logger="dschat"):
        rewards(reward_fn=[f"{others}:compute_score"], reward_pool="none")
    assert f"--reward_fn {others}:compute_score is called as verl calls it" in caplog.text


def test_a_wrong_argument_is_named(rewards, others):
    with pytest.raises(UserError, match=r"compute_score.bonu: it takes no bonu; it takes: .*bonus"):
        rewards(reward_fn=[f"{others}:compute_score"], reward_args=["compute_score.bonu=1"])


def test_each_answer_of_verl_has_its_own_info(rewards, samples):
    def score(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth) + len(extra_info or ())

    given = samples(2, answer=["a0", "b"], extra_info=[{"split": "train"}, None])
    assert scores_of(rewards([score]), given) == [[2, 0]]


def test_tensors_of_any_device_type_are_read(rewards, samples):
    def reward_func(queries, prompts, labels):
        return torch.tensor([2.0] * len(queries), dtype=torch.bfloat16)

    assert scores_of(rewards([reward_func]), samples(3)) == [[2, 2, 2]]
