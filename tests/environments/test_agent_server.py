"""The HTTP interface of agents: who may ask, what is refused, and which tokens a request reads."""

import asyncio
import copy
import http.client
import json
import sys
import time
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


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"logit_bias": {"100": 100.0}},
        {"max_tokens": 6, "presence_penalty": 1.5},
    ],
)
def test_free_answers_are_given_and_not_trained(more):
    """The conversation continues behind them, and only its other answers are trained."""
    seen = []

    def agent(client, prompt):
        url, key = client.base_url, client.api_key
        status, free = ask(url, key, body={"messages": prompt, "max_tokens": 5} | more)
        again = ask(url, key, body={"messages": ASKED[1], "max_tokens": 5} | more)[1]
        seen.extend([status, free["choices"][0]["message"], again["choices"][0]["message"]])
        asked = [*prompt, seen[1], {"role": "user", "content": "Again?"}]
        _, own = ask(url, key, body={"messages": asked, "max_tokens": 7})
        seen.append(own["usage"])
        return 1.0

    trainer, e = one(agent, agent_sampling="free")
    assert seen[0] == 200
    if "temperature" in more:  # greedy: the second question is another one
        assert seen[1]["content"]
    if "logit_bias" in more:
        assert seen[1]["content"] == trainer.engine.tokenizer.decode([100] * 5)
    assert e.num_sequences == 1  # the second question has nothing to train
    mask = e.answer_mask[0]
    assert mask.sum() == seen[3]["completion_tokens"]
    assert mask[: int(e.lengths[0] - e.prompt_lengths[0])].tolist().index(True) > 1
    assert (e.rollout_logprobs[0][~mask] == 0).all()
    text = trainer.engine.tokenizer.decode(e.input_ids[0][: e.lengths[0]])
    assert seen[1]["content"] in text
    trainer.train_rlhf(e)
    assert trainer.metrics["train/bad_steps"] == 0
    assert trainer.metrics["rollout/logprob_gap"] < 1e-4


def test_alternatives_are_those_of_the_model():
    seen = []

    async def agent(client, prompt):
        asked = {"model": "actor", "messages": prompt, "logprobs": True, "top_logprobs": 3}
        seen.append((await client.chat.completions.create(**asked)).choices[0].logprobs.content)
        return 1.0

    _, e = one(agent)
    told = [entry.logprob for entry in seen[0]]
    assert told == pytest.approx(e.rollout_logprobs[0][e.answer_mask[0]].tolist(), abs=1e-6)
    for entry in seen[0]:
        alternatives = [one.logprob for one in entry.top_logprobs]
        assert len(alternatives) == 3
        assert alternatives == sorted(alternatives, reverse=True)
        assert entry.logprob <= alternatives[0] + 1e-6


def test_a_stream_comes_in_pieces_and_one_that_is_left_is_not_trained():
    seen = []

    async def agent(client, prompt):
        asked = {"model": "actor", "messages": prompt, "stream": True}
        stream = await client.chat.completions.create(**asked)
        said = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        seen.append([piece for piece in said if piece])
        async for chunk in await client.chat.completions.create(**asked):
            if chunk.choices and chunk.choices[0].delta.content:
                break  # in the midst of it
        return 1.0

    options = {"max_turn_tokens": None, "max_answer_seq_len": 300, "min_answer_seq_len": 300}
    trainer, e = one(agent, **options)
    assert len(seen[0]) > 3
    assert e.num_sequences == 1
    text = trainer.engine.tokenizer.decode(
        e.input_ids[0][e.prompt_lengths[0] : e.lengths[0]], skip_special_tokens=True
    )
    assert text.strip() == "".join(seen[0]).strip()
    assert trainer.metrics["rollout/abandoned_answers"] == 1
    with trainer.engine.rollout_mode() as generator:
        assert generator.cache.num_free == generator.cache.num_pages


def test_text_that_continues_a_completion_keeps_its_tokens():
    """As a loop of thought and observation writes it; after an end it is a new row."""
    seen = []

    def agent(client, prompt):
        url, key = client.base_url, client.api_key
        text = "Question: How many?\nThought:"
        for _ in range(3):
            body = {"prompt": text, "max_tokens": 6}
            choice = ask(url, key, "/v1/completions", body)[1]["choices"][0]
            seen.append(choice["text"])
            text += choice["text"] + "\nObservation: 12\nThought:"
        return 1.0

    trainer, e = one(agent, min_answer_seq_len=120)
    assert e.rows_of_episodes == [1]
    assert e.answer_mask[0].sum() == 18
    tokenizer, between = trainer.engine.tokenizer, "\nObservation: 12\nThought:"
    whole = tokenizer.decode(e.input_ids[0][: e.lengths[0]])
    assert whole == "Question: How many?\nThought:" + between.join(seen)


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


class Leave(Walk):
    """It leaves a long answer before."""

    def run(self, url, key, prompt, columns, limit_s):
        at, body = urlsplit(str(url)), {"token_ids": prompt, "sampling_params": {"max_tokens": 200}}
        left = http.client.HTTPConnection(at.hostname, at.port)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        path = at.path.removesuffix("/v1") + "/inference/v1/generate"
        left.request("POST", path, json.dumps(body), headers)
        time.sleep(0.02)
        left.close()
        return super().run(url, key, prompt, columns, limit_s)


def walked(engine, prompts, numbers, agent=None, longest=30):
    """The tokens and log-probs of every row."""
    tokenizer = tokenizer_of(HERMES)
    server = AgentServer(tokenizer)
    shortest = 2 if longest == 30 else longest
    sampling = SamplingParams(longest, n=2, seed=5, min_new_tokens=shortest)
    args = RLHFConfig(max_answer_seq_len=longest, max_prompt_seq_len=30, agent_workers=4)
    agent = agent or Walk()
    runner = AgentRunner(engine, server.encoder, agent, args, sampling, server.address, server.open)
    ended = []
    found = runner.run(prompts, [{}] * len(prompts), numbers, lambda row, _: ended.append(row))
    if isinstance(agent, Leave):
        assert runner.num_left == 2 * len(prompts)
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


def test_two_ranks_end_answers_that_nobody_awaits(module_of):
    module, prompts = module_of("llama"), [[3, 4, 5], [6]]
    config, stats = copy.deepcopy(module.config), []
    config.max_position_embeddings = 256

    def work(member):
        made = empty_engine(config, group=member, page_size=4, max_seq_len=256)
        made.weights.load(stream(module))
        mine = [member.rank]
        rows = walked(made, [prompts[i] for i in mine], mine, Leave(), longest=200)
        stats.append(made.stats.answer_tokens)
        return rows

    rows = [row for of_rank in on_ranks(2, work) for row in of_rank]
    assert [len(tokens) for _, tokens, _, _ in rows] == [15] * 4
    assert max(stats) < 4 * 200  # not to their ends
