"""One game with a tool in three forms: TRL's class, a class that replies, an agent over HTTP."""

import json
import re
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.utils import get_json_schema

from dschat.builtin.tiny_model import resolve_model
from dschat.data.rendering import render_chat
from dschat.models.tokenizer import load_tokenizer

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
sys.path.insert(0, str(Path(__file__).parent))

from test_agents import ASKED, same_metrics, worth  # noqa: E402


class Tools:
    """A tool, as TRL's ``environment_factory`` has it; a reward function scores the answer."""

    def reset(self, **columns):
        self.calls = 0

    def look_up(self, number: str) -> str:
        """Looks a number up.

        Args:
            number: Its digits.
        """
        self.calls += 1
        return f"{number} is a number"

    def get_reward(self):
        return float(self.calls)


SCHEMA = get_json_schema(MethodType(Tools.look_up, Tools))


class Replies(Tools):
    """The same as a class that reads the calls itself, and replies with their results."""

    def step(self, answer):
        call = re.fullmatch("<tool_call>(.*)</tool_call>", answer)
        if call is None:
            return "", worth(answer), True
        return self.look_up(**json.loads(call[1])["arguments"]), 0.0, False


async def looks_up(client, prompt):
    """The same by an agent."""
    own, messages = Tools(), list(prompt)
    own.reset()
    while True:
        made = await client.chat.completions.create(
            model="actor", messages=messages, tools=[SCHEMA]
        )
        said = made.choices[0].message
        if not said.tool_calls:
            return own.get_reward() + worth(said.content)
        (call,) = said.tool_calls
        told = own.look_up(**json.loads(call.function.arguments))
        messages += [said, {"role": "tool", "content": told, "tool_call_id": call.id}]


@pytest.fixture
def caller(tmp_path):
    """A folder: ``builtin/tiny`` after some steps on such episodes."""
    folder = resolve_model("builtin/tiny")
    tokenizer = load_tokenizer(folder, "--model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = []
    for number, asked in enumerate(ASKED):
        call = {"name": "look_up", "arguments": {"number": str(number)}}
        calls = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
        told = {"role": "tool", "content": f"{number} is a number"}
        answers = [{"role": "assistant", "content": said} for said in ("I see.", "So it is.")]
        chats = [*asked, calls, told, answers[number % 2]], [*asked, answers[0]]
        texts += [render_chat(tokenizer, chat, tools=[SCHEMA]) for chat in chats]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = pad_sequence([torch.tensor(row) for row in rows], True, tokenizer.pad_token_id)
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "caller")
    tokenizer.save_pretrained(tmp_path / "caller")
    return str(tmp_path / "caller")


def test_a_tool_trains_the_same_as_trls_class_a_class_and_an_agent(caller):
    """A question, a call, its result, an answer: or an answer at once."""
    scores = [lambda answers: [worth(answer) for answer in answers]]
    forms = [{"environment": Tools, "reward_fns": scores}]
    forms += [{"environment": Replies}, {"agent": looks_up}]
    given = {"model": caller, "max_turn_tokens": 60, "temperature": 0.5}
    # Other batches round the large logits of a trained model by up to 3e-6.
    metrics, *_, of_agent = same_metrics(forms, [SCHEMA], atol=1e-5, **given)
    assert 0.3 < metrics["rollout/tool_calls"] < 0.7
    assert metrics["rollout/failed_tool_calls"] == 0
    assert of_agent["rollout/turns"] == 1 + metrics["rollout/tool_calls"]
    assert of_agent["rollout/rows_per_episode"] == 1
