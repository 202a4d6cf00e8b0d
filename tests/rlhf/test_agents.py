"""Training on agents that ask over HTTP: the same as an environment, rows, failures, bounds."""

import pytest
import torch
from documentation import PAGES, blocks
from program_cases import ppo_trainer
from step_cases import Case

from dschat.config import RLHFConfig
from dschat.data.batches import PromptTable
from dschat.data.segments import prompt_text_ids
from dschat.models.tokenizer import load_tokenizer
from dschat.rewards.scoring import RewardError
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.start import set_seed

pytest.importorskip("uvicorn")

ASKED = [[{"role": "user", "content": f"Tell me about the number {i}."}] for i in range(4)]
TURNS = 3


def worth(text):
    return float(len(text) % 5)


class Game:
    """Replies to two answers, and rewards all three."""

    def reset(self):
        self.turn, self.total = 0, 0.0

    def step(self, answer):
        self.turn += 1
        return f"Go on, {self.turn}.", worth(answer), self.turn == TURNS


async def play(client, prompt):
    """The same game, by an agent."""
    messages, total = list(prompt), 0.0
    for turn in range(1, TURNS + 1):
        made = await client.chat.completions.create(model="actor", messages=messages)
        answer = made.choices[0].message
        total += worth(answer.content)
        if made.choices[0].finish_reason == "length":
            break
        messages += [answer, {"role": "user", "content": f"Go on, {turn}."}]
    return total


def trainer_of(agent=None, reward_fns=(), environment=None, model="builtin/tiny", **options):
    defaults = dict(
        actor_model_name_or_path=model,
        critic_model_name_or_path="",
        advantage_estimator="grpo",
        dtype="fp32",
        max_prompt_seq_len=64,
        max_answer_seq_len=120,
        max_turn_tokens=24,
        min_answer_seq_len=1,
        per_device_generation_batch_size=4,
        per_device_training_batch_size=4,
        num_samples_per_prompt=4,
        actor_learning_rate=1e-3,
        kv_page_size=16,
        kl_coef=0.0,
    )
    config = RLHFConfig(**defaults | options)
    if environment is not None or agent is not None:
        config.scores_with_objects = True
    set_seed(config.seed)
    tokenizer = load_tokenizer(model, "--actor_model_name_or_path")
    engine = DeepSpeedRLHFEngine(model, None, tokenizer, 4, config)
    made = DeepSpeedPPOTrainer(
        engine, config, reward_fns=reward_fns, environment=environment, agent=agent
    )
    if model == "builtin/tiny":
        stops = tuple(sorted({1, *range(30, 90)}))  # random weights hardly ever draw the end
        with made.engine.rollout_mode() as generator:
            generator.stop_ids = stops
    return made


def prompts_of(trainer, asked=ASKED, tools=None, **columns):
    ids = [prompt_text_ids(trainer.engine.tokenizer, chat, tools=tools) for chat in asked]
    texts = [chat[-1]["content"] for chat in asked]
    return PromptTable(ids, columns=columns, sources=asked, texts=texts)


def same_metrics(forms, tools=None, atol=1e-6, **options):
    """The metrics of a step with each of ``forms``: their tokens and rewards are the same,
    log-probs to ``atol``, and the weights after it.
    """
    seen = []
    for given in forms:
        trainer = trainer_of(**given, **options)
        e = trainer.generate_experience(prompts_of(trainer, tools=tools))
        trainer.train_rlhf(e)
        weights = torch.cat([p.detach().flatten() for p in trainer.engine.actor.parameters()])
        seen.append((e, weights, dict(trainer.metrics)))
    one, before, _ = seen[0]
    assert one.advantages.any()
    for other, after, _ in seen[1:]:
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.answer_mask, other.answer_mask)
        for name in ("rollout_logprobs", "scores", "advantages"):
            values = getattr(one, name), getattr(other, name)
            assert torch.allclose(*values, rtol=1e-6, atol=atol), name
        assert torch.allclose(before, after, rtol=0, atol=1e-6)
    return [metrics for _, _, metrics in seen]


def test_an_agent_trains_as_the_environment_of_its_game():
    pytest.importorskip("openai")
    _, metrics = same_metrics([{"environment": Game}, {"agent": play}])
    assert metrics["rollout/turns"] > 1.5
    assert metrics["rollout/rows_per_episode"] == 1


async def branch(client, prompt, **columns):
    """Asks twice the same, summarises, and uses tools and a stream: rows of their own."""
    first, second = [
        (await client.chat.completions.create(model="actor", messages=prompt)).choices[0]
        for _ in range(2)
    ]
    summary = [{"role": "user", "content": "Say it again: " + first.message.content[:10]}]
    stream = await client.chat.completions.create(
        model="actor", messages=summary, stream=True, max_tokens=5
    )
    said = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    summary += [{"role": "assistant", "content": said}, {"role": "user", "content": "More."}]
    await client.chat.completions.create(model="actor", messages=summary, max_tokens=5)
    assert first.message.content != second.message.content
    return {"reward": worth(said), "length": len(said), "note": "text"}


def test_conversations_that_do_not_continue_are_rows_of_one_episode():
    pytest.importorskip("openai")
    trainer = trainer_of(branch)
    e = trainer.generate_experience(prompts_of(trainer))
    assert e.rows_of_episodes == [3] * 16
    assert e.numbers.tolist() == [i for i in range(16) for _ in range(3)]
    for name in ("scores", "scored"):
        values = getattr(e, name).view(16, 3)
        assert (values == values[:, :1]).all()
    advantages = torch.where(e.answer_mask, e.advantages, 0.0).sum(1) / e.answer_mask.sum(1)
    assert torch.allclose(advantages.view(16, 3), advantages.view(16, 3)[:, :1], atol=1e-6)
    scores = e.scores.view(4, 4, 3)[:, :, 0]
    by_hand = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    assert torch.allclose(advantages.view(4, 4, 3)[:, :, 0], by_hand, atol=1e-4)
    assert e.num_mini_batches == 4  # of four episodes, not rows
    for numbers in trainer._mini_batches(e, 0).reshape(16, 3):
        assert len(set(numbers)) == 1
    # what a reward model with another tokenizer and a teacher read, as the agent asked it
    assert e.sources[:2] == [ASKED[0]] * 2
    assert e.sources[2][0]["content"].startswith("Say it again: ")
    assert e.inputs == [{"tools": None}] * 48
    trainer.train_rlhf(e)
    metrics = trainer.metrics
    assert metrics["rollout/rows_per_episode"] == 3
    assert metrics["rollout/sequences"] == 16
    assert metrics["rollout/turns"] == 4
    assert metrics["objective/scores"] == pytest.approx(float(scores.double().mean()), abs=1e-6)
    assert 0 < metrics["rollout/length"] < 40
    assert "rollout/note" not in metrics
    # the third row has two answers, and what was said between them is not trained
    for row in range(2, 48, 3):
        assert not e.answer_mask[row, : e.lengths[row] - e.prompt_lengths[row]].all()


def seen_by(kind):
    """A reward function that keeps what it gets."""

    def score(prompts, prompt_messages, answers, number):
        kind.append((prompts, prompt_messages, answers, number))
        return [float(len(a)) for a in answers]

    return score


async def silent(client, prompt, number):
    asked = [*prompt, {"role": "system", "content": f"Be brief, {number}."}]
    await client.chat.completions.create(model="actor", messages=asked)


def test_reward_functions_get_the_last_answer_of_an_agent_without_reward():
    pytest.importorskip("openai")
    seen = []
    trainer = trainer_of(silent, [seen_by(seen)])
    e = trainer.generate_experience(prompts_of(trainer, number=[1, 2, 3, 4]))
    ((prompts, chats, answers, numbers),) = seen
    assert len(answers) == 16
    assert numbers == [n for n in (1, 2, 3, 4) for _ in range(4)]
    assert prompts[0] == ASKED[0][0]["content"]
    assert [chat[-1]["content"] for chat in chats] == [f"Be brief, {n}." for n in numbers]
    assert e.scores.tolist() == [float(len(a)) for a in answers]
    tokenizer = trainer.engine.tokenizer
    assert "Be brief, 1." in tokenizer.decode(e.input_ids[0])


async def clumsy(client, prompt, number):
    await client.chat.completions.create(model="actor", messages=prompt)
    if number == 2:
        raise ValueError("clumsy")
    return 1.0


@pytest.mark.parametrize("mode", ["error", "zero", "drop"])
def test_an_agent_that_fails(mode):
    pytest.importorskip("openai")
    trainer = trainer_of(clumsy, on_agent_error=mode)
    prompts = prompts_of(trainer, number=[1, 2, 3, 4])
    if mode == "error":
        with pytest.raises(RewardError, match="the agent raised ValueError: clumsy"):
            trainer.generate_experience(prompts)
        return
    e = trainer.generate_experience(prompts)
    assert trainer.metrics["rollout/agent_failures"] == 0.25
    assert len(e.numbers) == (16 if mode == "zero" else 12)
    assert set(e.scores[(e.numbers // 4) == 1].tolist()) == ({0.0} if mode == "zero" else set())
    trainer.train_rlhf(e)
    assert trainer.metrics["train/bad_steps"] == 0


async def asks_nothing(client, prompt):
    return 1.0


def test_an_agent_that_asks_nothing_has_failed():
    pytest.importorskip("openai")
    trainer = trainer_of(asks_nothing)
    with pytest.raises(RewardError, match="the agent ended without an answer that can be trained"):
        trainer.generate_experience(prompts_of(trainer))


async def hangs(client, prompt):
    import asyncio

    await client.chat.completions.create(model="actor", messages=prompt)
    await asyncio.sleep(60)


async def begins_again(client, prompt):
    for i in range(100):
        asked = [{"role": "user", "content": f"Number {i}?"}]
        await client.chat.completions.create(model="actor", messages=asked, max_tokens=2)
    return 1.0


async def outgrows(client, prompt):
    messages = list(prompt)
    while True:
        made = await client.chat.completions.create(model="actor", messages=messages)
        messages += [made.choices[0].message, {"role": "user", "content": "Go on. " * 5}]


@pytest.mark.parametrize(
    ("agent", "told"),
    [(hangs, "did not return within 0.5 s"), (begins_again, "began more than 3 conversations")],
)
def test_an_agent_that_does_not_end_is_bounded(agent, told, caplog):
    pytest.importorskip("openai")
    trainer = trainer_of(agent, agent_timeout_s=0.5, agent_max_rows=3, on_agent_error="zero")
    if agent is begins_again:
        trainer.args.agent_timeout_s = 60.0
    e = trainer.generate_experience(prompts_of(trainer))
    assert trainer.metrics["rollout/agent_failures"] == 1.0
    assert set(e.scores.tolist()) == {0.0}
    assert max(e.rows_of_episodes) == (1 if agent is hangs else 3)
    assert told in caplog.text
    with trainer.engine.rollout_mode() as generator:
        assert generator.cache.num_free == generator.cache.num_pages


def test_an_agent_whose_conversation_outgrows_its_room_has_the_reward_0():
    pytest.importorskip("openai")
    trainer = trainer_of(outgrows)
    e = trainer.generate_experience(prompts_of(trainer))
    assert trainer.metrics["rollout/agent_failures"] == 0
    assert set(e.scores.tolist()) == {0.0}
    assert (e.lengths - e.prompt_lengths).max() <= 120


COMMAND = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert sys.argv[1] == url
body = json.dumps({"messages": row["prompt"], "max_tokens": 6}).encode()
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
request = urllib.request.Request(f"{url}/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))
print("done")
print(json.dumps({"reward": row["number"], "tokens": answer["usage"]["completion_tokens"]}))
"""


def test_a_command_is_an_agent(tmp_path):
    import sys

    file = tmp_path / "agent.py"
    file.write_text(COMMAND)
    trainer = trainer_of(f"{sys.executable} {file} {{base_url}}", agent_workers=4)
    e = trainer.generate_experience(prompts_of(trainer, number=[1, 2, 3, 4]))
    assert e.scores.tolist() == [float(n) for n in (1, 2, 3, 4) for _ in range(4)]
    assert 16 <= trainer.metrics["rollout/tokens"] <= 96  # not the agent's number of this name


def test_a_critic_learns_from_every_row(models_folder):
    """Its reward stands at the last token of each."""
    pytest.importorskip("openai")

    def agent(client, prompt):
        for i, size in enumerate((3, 4)):
            asked = [2 + i, *map(int, prompt.split())]
            body = {"prompt": asked, "max_tokens": size}
            client.completions.create(model="actor", **body)
        return 2.0

    options = {"max_prompt_seq_len": 16, "max_answer_seq_len": 12, "kl_coef": 0.0}
    options |= {"reward_model_weight": 0.0, "missing_eos_penalty": 0.0, "scores_with_objects": True}
    engine = ppo_trainer(models_folder, Case("ppo", iterations=2), **options).engine
    trainer = DeepSpeedPPOTrainer(engine, engine.args, agent=agent)
    prompts = [[3 + i, 5, 7] for i in range(4)]
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    e = trainer.generate_experience(PromptTable(prompts, sources=texts, texts=texts))
    assert e.rows_of_episodes == [2] * e.num_prompts * 2
    assert set(e.scores.tolist()) == {2.0}
    for row in range(e.num_sequences):
        last = int(e.answer_mask[row].nonzero().max())
        assert float(e.returns[row][last]) == pytest.approx(2.0, abs=1e-5)
    trainer.train_rlhf(e)
    assert trainer.metrics["train/bad_steps"] == 0
    assert trainer.metrics["val/grad_norm"] > 0


def test_the_agent_of_the_page_runs_as_it_stands():
    pytest.importorskip("openai")
    (code,) = blocks(PAGES["agents.md"], "python")
    names = {}
    exec(code, names)
    trainer = trainer_of(names["run"])
    e = trainer.generate_experience(prompts_of(trainer, answer=["e", "a", "19", "the"]))
    right = {round(1 - 0.3 * attempt, 1) for attempt in range(3)} | {0.0}
    assert {round(score, 1) for score in e.scores.tolist()} <= right
    assert trainer.metrics["rollout/rows_per_episode"] == 1
    assert trainer.metrics["rollout/turns"] > 1
