"""Training on episodes: what the loss sees, rewards per turn, estimators, failures."""

import json
import threading
from types import SimpleNamespace

import pytest
import step_cases
import torch
from program_cases import ppo_trainer
from quick import slow
from step_cases import Case
from tiny_models import EOS
from tool_templates import HERMES, SCHEMAS, tokenizer_of

from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptTable, prompts_of
from dschat.data.segments import prompt_text_ids
from dschat.data.tokenize import prompt_dataset
from dschat.rlhf import episodes
from dschat.rlhf.episodes import EpisodeCollector
from dschat.rlhf.run_state import Run
from dschat.rlhf.trainer import DeepSpeedPPOTrainer

PROMPTS = [[3 + i, 5, 7] for i in range(8)]
TEXTS = [" ".join(map("w{}".format, prompt)) for prompt in PROMPTS]
REPLY = [11, 13, 17]
STOPS = (EOS, *range(20, 40))  # random weights hardly ever draw EOS


class Game:
    """Replies until the third answer; rewards each turn with its number."""

    def reset(self, prompt):
        self.turn = 0

    def step(self, answer):
        self.turn += 1
        return "w11 w13 w17", float(self.turn), self.turn == 3


def trainer_of(models_folder, environment=Game, reward_fns=(), **options):
    defaults = {"max_answer_seq_len": 40, "max_turn_tokens": 8, "kl_coef": 0.0}
    defaults |= {"reward_model_weight": 0.0}
    engine = ppo_trainer(models_folder, Case("ppo", iterations=2), **defaults | options).engine
    given = {"environment": environment, "reward_fns": reward_fns}
    made = DeepSpeedPPOTrainer(engine, engine.args, **given)
    with made.engine.rollout_mode() as generator:
        generator.stop_ids = STOPS
    return made


def gaps(e):
    return [
        (ids[p:n].tolist(), mask[: n - p].tolist())
        for ids, mask, p, n in zip(
            e.input_ids, e.answer_mask, e.prompt_lengths, e.lengths, strict=True
        )
    ]


@pytest.mark.parametrize("estimator", ["gae", *slow(["grpo", "reinforce_pp"])])
def test_no_loss_is_on_the_environments_tokens(estimator, models_folder):
    trainer = trainer_of(models_folder, advantage_estimator=estimator)
    e = trainer.generate_experience(PromptTable(PROMPTS, sources=TEXTS))
    replies = 0
    for tokens, mask in gaps(e):
        place = 0
        while False in mask[place:]:
            place = mask.index(False, place)
            assert tokens[place : place + 3] == REPLY
            assert mask[place : place + 3] == [False] * 3
            assert tokens[place - 1] in STOPS
            assert mask[place + 3]
            place += 3
            replies += 1
    assert replies > 3
    outside = ~e.answer_mask
    for name in ("logprobs", "advantages", "returns", "weights", "entropy", "values"):
        assert not getattr(e, name)[outside].any(), name
    assert not (e.loss_mask & outside).any()
    assert (e.logprobs - e.rollout_logprobs)[e.answer_mask].abs().max() < 1e-4
    before = [p.detach().clone() for p in trainer.engine.actor.parameters()]
    trainer.train_rlhf(e)
    pairs = zip(before, trainer.engine.actor.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert trainer.metrics["rollout/turns"] > 1
    assert trainer.metrics["rollout/environment_tokens"] > 0


def test_rewards_stand_at_the_last_token_of_their_turn(models_folder):
    e = trainer_of(models_folder).generate_experience(PROMPTS)
    whole = 0
    for row, (_, mask) in enumerate(gaps(e)):
        rewards = e.token_scores[row].tolist()
        turn = 0
        for i, drawn in enumerate(mask):
            is_last = drawn and (i + 1 == len(mask) or not mask[i + 1])
            turn += is_last
            assert rewards[i] == (float(turn) if is_last else 0.0)
        assert e.scores[row] == sum(range(turn + 1))
        assert bool(e.finished[row]) == (turn == 3)
        whole += turn == 3
    assert whole > 0


class Opened(Game):
    """Has a text after the prompt, of another length for each sample, and rewards the end."""

    def reset(self, seed):
        super().reset(None)
        self.seed = seed
        return "w3 " * (seed % 3)

    def get_reward(self):
        return float(self.seed % 5)


def graded(prompt_ids, answer_ids):
    return [float(sum(ids) % 7 - len(p)) for p, ids in zip(prompt_ids, answer_ids, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("environment", [Opened, Game])
def test_reward_functions_that_begin_early_score_the_same(environment, models_folder):
    seen = []
    for pool in ("none", "thread"):
        torch.manual_seed(0)
        options = {"reward_pool": pool, "reward_workers": 2, "num_samples_per_prompt": 2}
        trainer = trainer_of(models_folder, environment, [graded], **options)
        e = trainer.generate_experience(PromptTable(PROMPTS, sources=TEXTS))
        trainer.reward_functions.close()
        names = ("input_ids", "scores", "token_scores", "advantages")
        seen.append([getattr(e, name).tolist() for name in names])
        seen[-1] += [trainer.metrics["objective/scores/graded"]]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("pool", ["none", *slow(["thread"])])
def test_reward_functions_see_the_text_that_reset_appended(pool, models_folder):
    """In prompts as text, as in their ids; and so does who re-tokenizes the prompt."""
    seen = {}

    def told(prompts, prompt_ids):
        seen.update(zip(map(tuple, prompt_ids), prompts, strict=True))
        return [0.0] * len(prompts)

    options = {"reward_pool": pool, "reward_workers": 2}
    trainer = trainer_of(models_folder, Opened, [told], **options)
    batch = PromptTable(PROMPTS, sources=TEXTS, texts=TEXTS)
    e = trainer.generate_experience(batch)
    trainer.reward_functions.close()
    tokenizer = trainer.engine.tokenizer
    for ids, text in seen.items():
        assert prompt_text_ids(tokenizer, text) == list(ids)
    starts = zip(e.input_ids.tolist(), e.prompt_lengths.tolist(), e.sources, strict=True)
    for ids, length, source in starts:
        assert prompt_text_ids(tokenizer, source) == ids[:length]
    assert len(seen) > len(PROMPTS)  # samples of a prompt have other texts


@pytest.mark.parametrize("own", [None, SCHEMAS])
def test_a_prompt_with_the_text_of_reset_shows_the_tools_of_its_row(own, tmp_path):
    """Its ids are those of a row that has the text itself."""
    tools = [{"type": "function", "function": {"name": f"of_row_{i}"}} for i in range(3)]
    shown = [{"tools": tools[:1]}, {"tools": json.dumps(tools[1:])}, {}]
    shown.append({"functions": [tools[2]["function"]]})
    tokenizer, tables = tokenizer_of(HERMES), []
    for text in ("", " More."):
        rows = [{"prompt": [{"role": "user", "content": f"Hi.{text}"}]} | more for more in shown]
        path = tmp_path / f"{len(tables)}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RLHFConfig(data_path=[str(path)], data_split="0,0,1", max_prompt_seq_len=2000)
        config.output_dir = str(tmp_path)
        tables.append(prompts_of(list(prompt_dataset(config, tokenizer, tools=own))))
    collector = SimpleNamespace(
        args=config,
        _engine=SimpleNamespace(tokenizer=tokenizer),
        _source=SimpleNamespace(schemas=own),
    )
    for row in range(len(shown)):
        ids = EpisodeCollector._appended(collector, tables[0], row, " More.")
        assert ids == tables[1].ids[row]
        assert ("of_row" in tokenizer.decode(ids)) == bool(shown[row] and not own)


def test_the_text_of_a_prompt_that_begins_the_answer():
    last = {"role": "assistant", "content": "Sure: <think>"}
    sources = ["begins", [last], [last | {"begins": True}]]
    prompts = PromptTable([[1], [2], [3]], sources)
    assert [episodes._begun(prompts, row) for row in range(3)] == [None, None, last["content"]]
    assert episodes._begun(PromptTable([[1]]), 0) is None


def test_reward_functions_begin_while_episodes_run(models_folder):
    """The last game goes on when a call has begun, and the call ends after the last game."""
    began, over = threading.Event(), threading.Event()
    sizes = []

    def gated(answers):
        began.set()
        assert over.wait(60)
        sizes.append(len(answers))
        return [0.0] * len(answers)

    class Ending(Game):
        def reset(self, prompt):
            super().reset(prompt)
            self.is_long = prompt == "w3 w5 w7"

        def step(self, answer):
            if self.is_long:
                assert began.wait(60)
                over.set()
            return "", 1.0, True

    options = {"reward_pool": "thread", "reward_workers": 2, "environment_lag": 0}
    trainer = trainer_of(models_folder, Ending, [gated], **options)
    trainer.generate_experience(PROMPTS)
    trainer.reward_functions.close()
    assert sum(sizes) == 2 * len(PROMPTS)
    assert len(sizes) > 1


def test_a_failure_stops_the_run_with_one_line(models_folder):
    def step(observation, action):
        raise ValueError("no\nluck")

    trainer = trainer_of(models_folder, step)
    with pytest.raises(UserError, match="the environment failed: raised ValueError: no luck"):
        trainer.generate_experience(PROMPTS)


def test_a_resumed_run_draws_the_same_episodes(models_folder):
    first, second = (trainer_of(models_folder) for _ in range(2))
    first.generate_experience(PROMPTS)
    Run(second).load_state_dict(json.loads(json.dumps(Run(first).state_dict())))
    first.iteration = second.iteration = 1
    one, other = (t.generate_experience(PROMPTS) for t in (first, second))
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)


@pytest.mark.slow
def test_worker_processes_give_the_same_episodes(models_folder):
    environment = f"{step_cases.__file__}:Replies".replace("step_cases", "environment_of_cases")
    pools = [{"environment_pool": "process", "environment_workers": 2}, {}]
    one, other = (
        trainer_of(models_folder, environment, **pool).generate_experience(PROMPTS)
        for pool in pools
    )
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.token_scores, other.token_scores)
    assert one.token_scores.any()


def test_a_process_needs_an_importable_environment(models_folder):
    class Local(Game):
        pass

    with pytest.raises(UserError, match="--environment: Local cannot run in another process"):
        trainer_of(models_folder, Local, environment_pool="process")
