"""The HTTP interface of agents: who may ask, what is refused, and which tokens a request reads."""

import asyncio
import http.client
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
sys.path.insert(0, str(Path(__file__).parents[1] / "rlhf"))

from families import empty_engine, stream  # noqa: E402
from families import engine as family_engine  # noqa: E402
from rank_threads import on_ranks  # noqa: E402
from test_agents import ASKED, prompts_of, trainer_of  # noqa: E402
from tool_templates import HERMES, SCHEMAS, tokenizer_of  # noqa: E402

from dschat.config import RLHFConfig  # noqa: E402
from dschat.data.segments import prompt_text_ids  # noqa: E402
from dschat.environments.agent_episodes import AgentRunner  # noqa: E402
from dschat.environments.agent_server import AgentServer  # noqa: E402
from dschat.environments.agents import Outcome  # noqa: E402
from dschat.environments.contract import Observation, ToolResult  # noqa: E402
from dschat.environments.conversations import Conversations, TooLong  # noqa: E402
from dschat.environments.template_text import ObservationTokens  # noqa: E402
from dschat.inference import SamplingParams  # noqa: E402


def ask(url, key, path="/v1/chat/completions", body=None, host=None, method="POST"):
    """Status and JSON of a response."""
    at = urlsplit(str(url))
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    headers |= {"Host": host} if host else {}
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    base = at.path.rstrip("/").removesuffix("/v1")
    connection.request(method, base + path, data, headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text)


HELLO = {"messages": ASKED[0], "max_tokens": 3}


def one(agent, **options):
    """The trainer and experience of one episode of ``agent``."""
    options = {"num_samples_per_prompt": 1, "per_device_generation_batch_size": 1} | options
    trainer = trainer_of(agent, advantage_estimator="reinforce_pp", **options)
    return trainer, trainer.generate_experience(prompts_of(trainer, ASKED[:1]))


def test_foreign_requests_are_refused_and_touch_nothing():
    seen, kept = [], []

    def agent(client, prompt):
        url, key = client.base_url, client.api_key
        kept[:] = [url, key]
        seen.append(ask(url, "another", body=HELLO)[0])
        other = str(url).replace(key, "another")
        seen.append(ask(other, "another", body=HELLO)[0])
        seen.append(ask(url, key, body=b"{" + b" " * 20_000_000)[0])
        seen.append(ask(url, key, body=HELLO, host="example.org")[0])
        seen.append(ask(url, key, body=HELLO)[0])
        return 1.0

    trainer, e = one(agent)
    assert seen == [401, 404, 413, 403, 200]
    assert e.num_sequences == 1
    assert trainer.metrics["rollout/turns"] == 1
    assert ask(*kept, body=HELLO)[0] == 404  # it has ended


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"temperature": 0.2}, "temperature 0.2"),
        ({"top_p": 0.5}, "top_p 0.5"),
        ({"top_k": 5}, "top_k 5"),
        ({"n": 2}, "n 2"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs 2"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_a_request_of_another_distribution_is_refused_by_name(more, named):
    seen = []

    def agent(client, prompt):
        for body in (HELLO | more, HELLO | {"temperature": 1.0, "top_k": -1, "seed": 3}):
            seen.append(ask(client.base_url, client.api_key, body=body))
        return 1.0

    one(agent)
    (status, told), (right, _) = seen
    assert (status, right) == (400, 200)
    assert named in told["error"]["message"]


def test_a_stop_string_ends_an_answer_and_the_conversation_continues():
    seen = {}

    def agent(client, prompt):
        url, key = client.base_url, client.api_key
        _, whole = ask(url, key, body={"messages": prompt, "max_tokens": 20})
        seen["whole"] = text = whole["choices"][0]["message"]["content"]
        asked = [{"role": "user", "content": "Again?"}]
        body = {"messages": prompt, "max_tokens": 20, "stop": [text[4:6]]}
        seen["stop"] = text[4:6]
        _, cut = ask(url, key, body=body)
        seen["cut"] = cut["choices"][0]
        asked = [*prompt, seen["cut"]["message"], {"role": "user", "content": "Again?"}]
        ask(url, key, body={"messages": asked, "max_tokens": 4})
        return 1.0

    trainer, e = one(agent)
    assert e.rows_of_episodes == [2]
    text = trainer.engine.tokenizer.decode(e.input_ids[1][: e.lengths[1]])
    assert "<|end|><|user|>Again?<|assistant|>" in text
    drawn = e.answer_mask[1].tolist()
    between = trainer.engine.tokenizer("<|end|><|user|>Again?<|assistant|>")["input_ids"]
    assert drawn.count(False) - (len(drawn) - int(e.lengths[1] - e.prompt_lengths[1])) == len(
        between
    )
    if seen["cut"]["finish_reason"] == "stop":
        assert seen["stop"] not in seen["cut"]["message"]["content"]


def test_vllms_route_takes_ids_and_continues_them():
    seen = []

    def agent(client, prompt, ids):
        url, key = client.base_url, client.api_key
        for more in ([], [5, 6, 7]):
            params = {"max_tokens": 5, "logprobs": 1, "temperature": 1.0}
            params |= {"skip_special_tokens": False, "stop_token_ids": [1]}
            body = {"token_ids": ids + more, "sampling_params": params}
            status, told = ask(url, key, "/inference/v1/generate", body)
            assert status == 200, told
            seen.append(choice := told["choices"][0])
            ids = ids + more + choice["token_ids"]
        status, told = ask(url, key, "/v1/models", method="GET")
        seen.append(told["data"][0])
        for bad in ({"max_tokens": "x"}, {"stop_token_ids": [1, 7]}):
            body = {"token_ids": ids, "sampling_params": bad}
            seen.append(ask(url, key, "/inference/v1/generate", body)[0])
        return 1.0

    trainer = trainer_of(agent, num_samples_per_prompt=1, advantage_estimator="reinforce_pp")
    ids = prompt_text_ids(trainer.engine.tokenizer, ASKED[0])
    e = trainer.generate_experience(prompts_of(trainer, ASKED[:1], ids=[ids]))
    first, second, model, *statuses = seen
    assert (e.num_sequences, statuses) == (1, [400, 400])
    row = e.input_ids[0][: e.lengths[0]].tolist()
    assert row == ids + first["token_ids"] + [5, 6, 7] + second["token_ids"]
    names = [entry["token"] for entry in first["logprobs"]["content"]]
    assert names == [f"token_id:{number}" for number in first["token_ids"]]
    told = [entry["logprob"] for c in (first, second) for entry in c["logprobs"]["content"]]
    assert told == pytest.approx(e.rollout_logprobs[0][e.answer_mask[0]].tolist(), abs=1e-6)
    with trainer.engine.rollout_mode() as generator:
        assert model["max_model_len"] == generator.max_seq_len


def test_an_answer_that_nobody_awaits_is_dropped_and_counted():
    async def agent(client, prompt):
        asking = client.chat.completions.create(model="actor", messages=prompt)
        try:
            await asyncio.wait_for(asking, 0.002)
        except asyncio.TimeoutError:
            await asyncio.sleep(0.5)
        await client.chat.completions.create(model="actor", messages=ASKED[1], max_tokens=3)
        return 1.0

    options = {"max_turn_tokens": None, "max_answer_seq_len": 300, "min_answer_seq_len": 300}
    trainer, e = one(agent, **options)
    assert trainer.metrics["rollout/abandoned_answers"] <= 1
    assert trainer.metrics["rollout/turns"] + trainer.metrics["rollout/abandoned_answers"] <= 2
    with trainer.engine.rollout_mode() as generator:
        assert generator.cache.num_free == generator.cache.num_pages


# -- conversations alone -----------------------------------------------------------------------


def conversations(**options):
    tokenizer = tokenizer_of(HERMES)
    args = RLHFConfig(**{"max_prompt_seq_len": 1000, "max_answer_seq_len": 600} | options)
    return Conversations(0, (0, 0), tokenizer, args), ObservationTokens(tokenizer, True), tokenizer


CALL = {"name": "search", "arguments": {"query": "sun"}}


def test_results_of_tools_continue_the_very_tokens():
    episode, observations, tokenizer = conversations()
    inputs = {"tools": SCHEMAS}
    asked = [{"role": "user", "content": "Search."}]
    row = episode.chat(observations, asked, inputs)
    assert row.prompt == prompt_text_ids(tokenizer, asked, **inputs)
    # not as the tokenizer writes it: one character a token
    text = "\n<tool_call>\n" + json.dumps(CALL) + "\n</tool_call>"
    drawn = [tokenizer.convert_tokens_to_ids(c) for c in tokenizer.backend_tokenizer.pre_tokenizer
             .pre_tokenize_str(text) for c in c[0]] + [tokenizer.eos_token_id]  # fmt: skip
    row.add(drawn, [-1.0] * len(drawn))
    row.is_ended = True
    call = {"id": "call_1", "type": "function", "function": CALL}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    episode.answered(row, turn, inputs)
    result = {"role": "tool", "content": "hot", "tool_call_id": "call_9"}
    renamed = {**turn, "tool_calls": [{**call, "id": "call_9"}]}
    again = episode.chat(observations, [*asked, renamed, result], inputs)
    assert again is row
    assert row.ids[: len(row.prompt) + len(drawn)] == row.prompt + drawn
    assert row.asked == observations(Observation(results=(ToolResult("search", "hot"),)))
    # the same conversation with other tools is another row
    row.add([3], [-1.0])
    episode.answered(row, {"role": "assistant", "content": "x"}, inputs)
    more = [*row.messages, {"role": "user", "content": "And?"}]
    assert episode.chat(observations, more, {"tools": None}) is not row


def test_a_changed_answer_is_a_new_row_and_the_longest_conversation_continues():
    episode, observations, tokenizer = conversations()
    inputs = {"tools": None}
    turns = [{"role": "user", "content": "One."}]
    row = episode.chat(observations, turns, inputs)
    for said in ("a", "b"):
        row.add([tokenizer.convert_tokens_to_ids(said), tokenizer.eos_token_id], [-1.0, -1.0])
        row.is_ended = True
        episode.answered(row, {"role": "assistant", "content": said}, inputs)
        turns = [*row.messages, {"role": "user", "content": "More."}]
        before = row.prompt + row.tokens
        assert episode.chat(observations, turns, inputs) is row
        assert row.ids[: len(before)] == before
        assert tokenizer.decode(row.asked) == "\n<im>user\nMore.<eot>\n<im>assistant\n"
    other = [*turns[:1], {"role": "assistant", "content": "c"}, *turns[2:]]
    assert episode.chat(observations, other, inputs) is not row


def test_conversations_have_bounds():
    episode, observations, _ = conversations(max_prompt_seq_len=60, agent_max_rows=2)
    inputs = {"tools": None}
    with pytest.raises(TooLong, match="--max_prompt_seq_len"):
        episode.chat(observations, [{"role": "user", "content": "x" * 90}], inputs)
    for _ in range(2):
        episode.chat(observations, [{"role": "user", "content": "x"}], inputs)
    with pytest.raises(Exception, match="--agent_max_rows"):
        episode.chat(observations, [{"role": "user", "content": "x"}], inputs)
    assert episode.problem


# -- a tensor-parallel group -------------------------------------------------------------------


class Walk:
    """An agent of ids: three answers in a row, one of its own between."""

    def run(self, url, key, prompt, columns, limit_s):
        ids, params = list(prompt), {"max_tokens": 4}
        for more in ([], [5, 6], [7]):
            body = {"token_ids": ids + more, "sampling_params": params}
            status, told = ask(url, key, "/inference/v1/generate", body)
            assert status == 200, told
            ids += more + told["choices"][0]["token_ids"]
        return Outcome(1.0)


def walked(engine, prompts, numbers):
    """The tokens and log-probs of every row."""
    tokenizer = tokenizer_of(HERMES)
    server = AgentServer(tokenizer)
    sampling = SamplingParams(30, n=2, seed=5, min_new_tokens=2)
    args = RLHFConfig(max_answer_seq_len=30, max_prompt_seq_len=30, agent_workers=4)
    runner = AgentRunner(
        engine, tokenizer, server.encoder, Walk(), args, sampling, server.address, server.open
    )
    ended = []
    found = runner.run(prompts, [{}] * len(prompts), numbers, lambda row, _: ended.append(row))
    assert sorted(ended) == list(range(len(prompts)))
    assert not server.open
    assert engine.cache.num_free == engine.cache.num_pages
    assert [episode.problem for episode in found] == [""] * len(found)
    return [(row.prompt, row.tokens, row.drawn, row.logprobs) for e in found for row in e.rows]


@pytest.mark.parametrize("shares", [([0], [1, 2]), ([0, 1, 2], [])])
def test_two_ranks_serve_their_own_agents(shares, module_of):
    module, prompts = module_of("llama"), [[3, 4, 5], [6], [7, 8]]
    expected = walked(family_engine(module, page_size=4), prompts, [0, 1, 2])
    assert len(expected) == 6

    def work(member):
        made = empty_engine(module.config, group=member, page_size=4)
        made.weights.load(stream(module))
        mine = shares[member.rank]
        return walked(made, [prompts[i] for i in mine], mine)

    first, second = on_ranks(2, work)
    for one, other in zip(first + second, expected, strict=True):
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3], abs=5e-5)
