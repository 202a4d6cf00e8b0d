"""``--max_tokens_per_micro_batch`` in the estimates: a budget takes what as many rows take."""

import pytest
from estimates import estimated

BY_STEP = {
    1: ("per_device_train_batch_size", {"max_seq_len": 64}),
    2: ("per_device_train_batch_size", {"max_seq_len": 64, "loss": "dpo"}),
    3: ("per_device_training_batch_size", {"max_prompt_seq_len": 40, "max_answer_seq_len": 24}),
}


def peaks(tiny, number: int, rows: int, times: int, **more) -> dict[str, int]:
    size, fields = BY_STEP[number]
    model = "actor_model_name_or_path" if number == 3 else "model_name_or_path"
    fields = fields | {model: tiny("llama"), size: rows, "gradient_accumulation_steps": times}
    if number == 3:
        # One answer a prompt: rows share prompts, a budget counts none as shared.
        fields |= {"advantage_estimator": "reinforce", "per_device_generation_batch_size": 32}
        fields |= {"reward_fn": ["exact_match"]}
    else:
        fields |= {"per_device_eval_batch_size": 1}
    done = estimated(fields | more, number)
    return {mode.name: mode.total for mode in done.modes}


@pytest.mark.parametrize("number", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_a_budget_takes_what_its_rows_take(tiny, number):
    """Micro-batches of 16 rows, or of 2 by budget; a budget beyond the step takes the step's."""
    sequences = 2 if number == 2 else 1
    tokens = {rows: rows * sequences * 64 for rows in (2, 16)}
    by_rows = peaks(tiny, number, 2, 8)["training"]
    assert peaks(tiny, number, 16, 1, max_tokens_per_micro_batch=tokens[2])["training"] == by_rows
    whole = peaks(tiny, number, 16, 1)["training"]
    assert whole > by_rows
    for budget in (tokens[16], 100 * tokens[16]):
        found = peaks(tiny, number, 2, 8, max_tokens_per_micro_batch=budget)["training"]
        assert found == whole


def test_auto_is_estimated_by_its_first_trial(tiny):
    by_tokens = peaks(tiny, 1, 64, 1, max_tokens_per_micro_batch=1024)
    assert peaks(tiny, 1, 64, 1, max_tokens_per_micro_batch="auto") == by_tokens


def test_scoring_takes_a_budget_of_the_rollout_not_of_the_step(tiny):
    budget = {"max_tokens_per_micro_batch": 32 * 64}
    assert peaks(tiny, 3, 4, 1, **budget)["scoring"] == peaks(tiny, 3, 32, 1)["scoring"]
