"""Estimates a step on a GPU of a given size, for the tests beside it."""

from dschat.estimate import PlanRequest
from dschat.estimate.report import make_estimator


def estimated(
    fields: dict,
    number: int = 3,
    num_processes: int = 1,
    gib: float = 80.0,
    name: str | None = None,
):
    """The estimate of one step on a GPU of ``gib``."""
    request = PlanRequest({number: fields}, num_processes, num_processes, gib, name)
    return make_estimator(request)(number)


def rlhf_fields(model: str) -> dict:
    """Fields of step 3: prompts of 24 tokens, two answers of 16 to each, two optimizer steps."""
    return {
        "actor_model_name_or_path": model,
        "reward_model_name_or_path": model,
        "max_prompt_seq_len": 24,
        "max_answer_seq_len": 16,
        "num_samples_per_prompt": 2,
        "per_device_generation_batch_size": 8,
        "per_device_training_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }


def pairs_estimate(tiny, **knobs):
    fields = {"model_name_or_path": tiny("llama"), "max_seq_len": 32, "loss": "dpo"}
    return estimated(fields | knobs, number=2)
