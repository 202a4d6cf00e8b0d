"""Where a generation prompt opens a thought, reward functions and files see the whole answer."""

import json
from types import SimpleNamespace

import pytest
from byte_tokenizers import CHATML, byte_tokenizer

from dschat.config import RLHFConfig
from dschat.data.batches import PromptTable
from dschat.data.segments import prompt_text_ids
from dschat.inference.protocol import Rollout, SamplingParams
from dschat.offline.flags import GenerateConfig
from dschat.offline.rows import AnswerLines, Row
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rlhf.collector import Group, RolloutPolicy
from dschat.rlhf.episodes import EpisodeCollector
from dschat.rlhf.prompts import PromptQueue
from dschat.rlhf.retokenize import Retokenizer

ASKED = [{"role": "user", "content": "2+2?"}]
OPENED = ["<think>\n", "<think>", "[THINK]", "<reasoning>\n\n", "<|START_THINKING|>"]
CLOSED = ["", "<think>\n\n</think>\n\n", "[/INST]", "<answer>", "think", "<b>", "[/THINK] "]


def tokenizer_of(end):
    """Its generation prompt ends in ``end``."""
    template = CHATML.replace("assistant\n", "assistant\n" + end)
    return byte_tokenizer("<|im_end|>", template, pad_token="<pad>")


def answers_of(tokenizer, *texts):
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids = [[*row, tokenizer.eos_token_id] for row in ids]
    return Rollout(ids, [[-1.0] * len(row) for row in ids], ["stop"] * len(ids))


class Told(EpisodeCollector):
    """Has the answers that it is told."""

    def answers(self, generator, prompts, sampling, numbers, add):
        add(Group(0, prompts.pick([0] * len(generator)), generator))
        return {}


def seen_of(tokenizer, rollout, tools):
    """What a reward function gets of ``rollout``."""
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    engine, args = SimpleNamespace(reward=None, teacher=None, tokenizer=tokenizer), RLHFConfig()
    source = SimpleNamespace(tools=tools, rewards=False, maker=lambda *_: None)
    prompts = PromptTable([prompt_text_ids(tokenizer, ASKED)])
    functions, policy = RewardFunctions(args, [reward]), RolloutPolicy(PromptQueue())
    collector = Told(engine, args, functions, policy, source)
    collector.sources(*collector.answers_of(rollout, prompts, SamplingParams(), 0), 8)
    return seen


@pytest.mark.parametrize("end", [*OPENED, *CLOSED])
def test_a_reward_function_gets_the_thought_with_both_tags(end):
    tokenizer = tokenizer_of(end)
    begun = end if end in OPENED else ""
    rollout = answers_of(tokenizer, "hm</think>4", "5")
    assert seen_of(tokenizer, rollout, []) == [begun + "hm</think>4", begun + "5"]


def test_the_last_answer_of_an_episode_with_tools_begins_behind_the_last_prompt():
    tokenizer = tokenizer_of("")  # the thought is opened behind the tool's result alone
    rollout = answers_of(tokenizer, "call")
    rollout.drawn = [[True] * len(rollout.token_ids[0])]
    again = "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for text, drawn in ((again, False), ("so</think>4", True)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        rollout.drawn[0] += [drawn] * len(ids)
        rollout.logprobs[0] += [-1.0] * len(ids)
        rollout.token_ids[0] += ids
    assert seen_of(tokenizer, rollout, ["add"]) == ["<think>\nso</think>4"]


@pytest.mark.parametrize("end", ["<think>\n", ""])
def test_generated_lines_have_the_whole_answer(end):
    tokenizer = tokenizer_of(end)
    rows = SimpleNamespace(columns=[], prompt_columns=set())
    lines = AnswerLines(GenerateConfig(n=1), rows, tokenizer)
    row = Row("rows:1", {}, ASKED, ids=prompt_text_ids(tokenizer, ASKED))
    (line,) = lines.of([row], answers_of(tokenizer, "hm</think>4"), None)
    assert json.loads(line)["answer"] == end + "hm</think>4"


@pytest.mark.parametrize("end", ["<think>\n", ""])
def test_a_reward_model_with_another_template_reads_the_whole_answer(end):
    actor, reward = tokenizer_of("<think>\n"), tokenizer_of(end)
    retokenizer = Retokenizer(actor, reward, [actor.eos_token_id])
    (answer,) = answers_of(actor, "hm</think>4").token_ids
    ids = retokenizer.sequence(prompt_text_ids(actor, ASKED), answer, True, ASKED)
    whole = (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\nhm</think>4<|im_end|>"
    )
    assert reward.decode(ids) == whole
