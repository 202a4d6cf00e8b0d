"""GRPO in one file, on dschat's public parts: load, rollout, score, advantages, loss, step, save.

    deepspeed examples/grpo_loop.py            # or: python examples/grpo_loop.py, one process

A tiny model that knows nothing learns to write lower-case letters, in half a minute on a CPU. What
`dschat.GRPOTrainer` adds to this are rewards of many kinds, checkpoints, evaluations, episodes and
logs. On the same prompts its trainer computes the same numbers.

Shapes: S answers of this rank (prompts x samples), T columns, A actions (tokens of an answer).
"""

import sys

import torch

import dschat.distributed as dist
from dschat import DeepSpeedRLHFEngine, RLHFConfig, losses
from dschat.config import UserError
from dschat.data.segments import prompt_text_ids
from dschat.inference.protocol import SamplingParams
from dschat.models.tokenizer import load_tokenizer
from dschat.rlhf.experience import Experience, from_rollout, mini_batch_of
from dschat.rlhf.forwards import action_logprobs
from dschat.runtime.optimizer_step import OptimizerStep

MODEL = "builtin/tiny"
QUESTIONS = [
    "What is 2 plus 3?",
    "Name the opposite of hot.",
    "Which animal says moo?",
    "What color is the sky?",
]
SETTINGS = RLHFConfig(
    advantage_estimator="grpo",
    num_samples_per_prompt=8,
    per_device_generation_batch_size=4,  # prompts of a rollout on each rank
    per_device_training_batch_size=8,  # answers of a micro-batch
    max_answer_seq_len=24,
    actor_learning_rate=5e-3,
    lr_scheduler_type="constant",
    kl_coef=0.01,
)
ITERATIONS = 20


def main(settings: RLHFConfig = SETTINGS, iterations: int = ITERATIONS) -> list[dict[str, float]]:
    """Train for some iterations; returns the mean score, loss and KL of each."""
    tokenizer = load_tokenizer(MODEL, "actor")
    engine = DeepSpeedRLHFEngine(
        actor_model_name_or_path=MODEL,
        tokenizer=tokenizer,
        num_total_iters=iterations,
        args=settings,
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [prompt_text_ids(tokenizer, chat) for chat in dist.my_share(chats)]
    log = []
    for iteration in range(iterations):
        experience = rollout(engine, prompts, settings, iteration)
        answers = answer_texts(tokenizer, experience)
        experience.scores = torch.tensor([letters(answer) for answer in answers])
        fill_in_reference(engine, experience, settings)
        fill_in_advantages(experience, settings, num_groups=len(QUESTIONS))
        log.append(train(engine, experience, settings, iteration))
        if dist.rank() == 0:
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in log[-1].items())
            sys.stdout.write(f"iteration {iteration:2}  {numbers}  {answers[0]!r}\n")
    if settings.output_dir:
        engine.save(settings.output_dir)  # a Hugging Face folder: output_dir/actor
    return log


def letters(answer: str) -> float:
    """The reward: the share of the answer's characters that are lower-case letters or spaces."""
    return sum(c.islower() or c == " " for c in answer) / max(1, len(answer))


def rollout(
    engine: DeepSpeedRLHFEngine, prompts: list[list[int]], settings: RLHFConfig, iteration: int
) -> Experience:
    """Collective. Answer this rank's prompts by the actor's inference form.

    Entering `rollout_mode` brings the weights of training to the generator. A draw depends on the
    seed, the number of the prompt over all ranks, the sample and the position, and on nothing else.
    """
    seed = settings.seed * 1_000_003 + iteration
    sampling = SamplingParams.from_config(settings, seed, settings.num_samples_per_prompt)
    counts = dist.gather_objects(len(prompts))
    first = sum(counts[: dist.rank()])
    with engine.rollout_mode() as generator:
        numbers = [first + i for i in range(len(prompts))]
        answers = generator.generate(prompts, sampling, numbers)
    repeated = [prompt for prompt in prompts for _ in range(sampling.n)]
    pad_id = engine.tokenizer.pad_token_id
    experience = from_rollout(repeated, answers, pad_id, first_index=first * sampling.n)
    # The generator's log-probs are those of training up to rounding: no forward to recompute them.
    experience.logprobs = experience.rollout_logprobs
    return experience


def answer_texts(tokenizer, experience: Experience) -> list[str]:  # noqa: ANN001
    """The S answers without special tokens."""
    rows = zip(experience.input_ids, experience.prompt_lengths, experience.lengths, strict=True)
    ids = [row[start:end].tolist() for row, start, end in rows]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@torch.no_grad()
def fill_in_reference(engine: DeepSpeedRLHFEngine, e: Experience, settings: RLHFConfig) -> None:
    """Collective. Log-probs (S, A) of the answers by the model before training, for the KL."""
    rows = list(range(e.num_sequences))
    size = settings.per_device_training_batch_size
    with engine.reference() as reference:
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            # `take` packs the rows end to end, a prompt once for all its answers.
            batch = e.take(part, dist.device())
            logprobs, _ = action_logprobs(reference, batch, settings.temperature)
            e.ref_logprobs[part, : logprobs.shape[1]] = logprobs.cpu()


def fill_in_advantages(e: Experience, settings: RLHFConfig, num_groups: int) -> None:
    """Collective. (Score - mean of the prompt's answers) / their deviation, at every action."""
    groups = e.numbers // settings.num_samples_per_prompt
    # The answers to a prompt may lie on several ranks: sums first, then means.
    stats = dist.all_reduce_sum(losses.group_stats(e.scores, groups, num_groups))
    advantages = losses.grpo_advantages(e.scores, groups, stats)
    e.advantages = torch.where(e.answer_mask, advantages.unsqueeze(1), 0.0)


def train(
    engine: DeepSpeedRLHFEngine, e: Experience, settings: RLHFConfig, iteration: int
) -> dict[str, float]:
    """Collective. The optimizer steps of one rollout; its mean score, loss and KL."""
    num_steps = settings.mini_batches_of(len(QUESTIONS), dist.world_size())
    engine.lay_schedules(num_steps)
    engine.actor.train()
    # All answers to a prompt are in one step, where their prompt is computed once.
    together = settings.num_samples_per_prompt
    number = mini_batch_of(e.numbers, num_steps, [settings.seed, iteration, 0], together)
    size, sums = settings.per_device_training_batch_size, torch.zeros(3)
    for m in range(num_steps):
        rows = [int(i) for i in (number == m).nonzero()[0]]
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        # Losses are sums, divided by the actions of the whole step, over all ranks and its
        # micro-batches: the update does not depend on how the rows are split.
        (num_actions,) = dist.sum_floats([float(e.answer_mask[rows].sum())])
        step = OptimizerStep(engine.actor, len(parts), num_actions)
        for part in parts:
            batch = e.take(part, dist.device())
            loss, kl = micro_batch_loss(engine, batch, settings, one_step=num_steps == 1)
            step.backward(loss)
            sums += torch.stack([loss.detach().cpu(), kl.cpu(), batch.answer_mask.sum().cpu()])
        if step.finish():  # clips the gradient; False where it is not finite
            engine.version += 1  # the next rollout takes the new weights
    local = [float(e.scores.sum()), float(e.num_sequences), *sums.tolist()]
    score, answers, loss_sum, kl_sum, actions = dist.sum_floats(local)
    return {"score": score / answers, "loss": loss_sum / actions, "kl": kl_sum / actions}


def micro_batch_loss(
    engine: DeepSpeedRLHFEngine, batch: Experience, settings: RLHFConfig, one_step: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss and the weighted KL to the reference, summed over the actions."""
    mask = batch.answer_mask
    logprobs, _ = action_logprobs(engine.actor, batch, settings.temperature)
    # The first step of a rollout starts from the policy that drew it: its ratio is 1.
    old = logprobs.detach() if one_step else batch.logprobs
    low_and_high = settings.cliprange_sides
    loss, _ = losses.ppo_loss(
        logprobs, old, batch.advantages, mask, low_and_high, weights=mask.float()
    )
    kl = losses.kl_penalty(logprobs, batch.ref_logprobs, settings.kl_by)
    kl = torch.where(mask, kl, 0.0).sum()
    return loss + settings.kl_weight * kl, kl.detach()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # a mistake in the settings: one line
        sys.exit(str(error))
