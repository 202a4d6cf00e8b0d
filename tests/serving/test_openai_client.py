"""OpenAI's own client against the server: answers are those of the engine."""

import asyncio

import pytest

from dschat.data.segments import prompt_text_ids
from dschat.inference import InferenceEngine, SamplingParams

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "tell me about the sun"}]


@pytest.fixture(scope="module")
def alone(served, same_products):
    """``alone(ids, **sampling)``: answers of an engine of its own, as (text, rollout)."""
    from dschat.builtin.tiny_model import resolve_model

    engine, stops = served.model.worker.engine, served.model.worker.engine.stop_ids
    with same_products():
        own = InferenceEngine.from_pretrained(
            resolve_model("builtin/tiny"), stop_ids=stops, num_tokens=engine.num_tokens
        )

    def answers(ids, **sampling):
        rollout = own.generate([ids], SamplingParams(**sampling))
        tokenizer = served.model.tokenizer
        texts = [tokenizer.decode(a, skip_special_tokens=True) for a in rollout.token_ids]
        return texts, rollout

    return answers


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(client, alone, served, stream):
    ids = prompt_text_ids(served.model.tokenizer, MESSAGES)
    texts, rollout = alone(ids, max_new_tokens=20, seed=3, n=2, temperature=0.8)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    got = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, seed=3, n=2, temperature=0.8, **options
    )
    said, reasons, usage = ["", ""], {}, None
    for chunk in got if stream else [got]:
        usage = chunk.usage or usage
        assert chunk.model == "tiny"
        for choice in chunk.choices:
            said[choice.index] += (choice.delta if stream else choice.message).content or ""
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert said == texts
    assert [reasons[0], reasons[1]] == rollout.finish_reasons
    assert usage.prompt_tokens == len(ids)
    assert usage.completion_tokens == sum(map(len, rollout.token_ids))


def test_the_last_message_is_continued(client, alone, served):
    """As vLLM's clients ask for it; the answer is the rest alone."""
    tokenizer, begun = served.model.tokenizer, [*MESSAGES, {"role": "assistant", "content": "The"}]
    text = tokenizer.apply_chat_template(begun, continue_final_message=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts, _ = alone(ids, max_new_tokens=8, seed=3)
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    options = {"model": "tiny", "messages": begun, "max_tokens": 8, "seed": 3}
    got = client.chat.completions.create(**options, extra_body=fields)
    assert got.choices[0].message.content == texts[0]
    assert got.usage.prompt_tokens == len(ids)
    closed = client.chat.completions.create(**options)
    assert closed.usage.prompt_tokens == len(prompt_text_ids(tokenizer, begun)) > len(ids)
    with pytest.raises(openai.BadRequestError, match="the last message is no assistant's text"):
        client.chat.completions.create(**options | {"messages": MESSAGES}, extra_body=fields)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, alone, served, stream):
    ids = prompt_text_ids(served.model.tokenizer, MESSAGES)
    _, rollout = alone(ids, max_new_tokens=5, seed=5, ignore_eos=True)
    got = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=5,
        seed=5,
        logprobs=True,
        top_logprobs=3,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    chunks = list(got) if stream else [got]
    entries = [e for c in chunks for ch in c.choices if ch.logprobs for e in ch.logprobs.content]
    assert [e.logprob for e in entries] == pytest.approx(rollout.logprobs[0], abs=1e-4)
    assert [e.token for e in entries] == [
        served.model.tokenizer.decode([token]) for token in rollout.token_ids[0]
    ]
    for entry in entries:
        top = [t.logprob for t in entry.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert entry.logprob <= top[0] + 1e-6


def test_completions_of_text_and_ids(client, alone, served):
    text = "the moon is"
    ids = served.model.tokenizer.encode(text)
    texts, rollout = alone(ids, max_new_tokens=6, seed=6, n=2)
    got = client.completions.create(
        model="tiny", prompt=[text, text], max_tokens=6, seed=6, n=2, logprobs=0
    )
    assert [choice.text for choice in got.choices] == texts * 2
    for choice, logprobs in zip(got.choices, rollout.logprobs * 2, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    of_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=6, seed=6, n=2)
    assert [choice.text for choice in of_ids.choices] == texts


def test_a_stop_string_ends_an_answer(client, alone, served):
    ids = served.model.tokenizer.encode("sun")
    (text,), _ = alone(ids, max_new_tokens=40, seed=7, ignore_eos=True)
    stop = text[10:13]
    got = client.completions.create(
        model="tiny",
        prompt="sun",
        max_tokens=40,
        seed=7,
        stop=[stop, "nowhere in it"],
        extra_body={"ignore_eos": True},
    )
    assert got.choices[0].text == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"


def test_under_load_tokens_come_together(client, alone, served, monkeypatch):
    """The first one at once, all others with the last."""
    monkeypatch.setattr("dschat.openai_api.delivery._GATHER_S", 1e6)
    monkeypatch.setattr("dschat.openai_api.delivery._LONGEST_GATHER_S", 1e6)
    ids = served.model.tokenizer.encode("sun")
    texts, _ = alone(ids, max_new_tokens=9, seed=8, n=2, ignore_eos=True)
    ask = {"model": "tiny", "prompt": "sun", "max_tokens": 9, "seed": 8, "n": 2, "stream": True}
    chunks = [c.choices for c in client.completions.create(**ask, extra_body={"ignore_eos": True})]
    for i, text in enumerate(texts):
        of_choice = [choice for (choice,) in chunks if choice.index == i]
        assert "".join(choice.text for choice in of_choice) == text
        assert len(of_choice) <= 2
        assert [choice.finish_reason for choice in of_choice][-1] == "length"


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "dschat")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_twenty_streams_at_once(alone, served):
    """Eight slots. Every stream gets its whole answer, the same as alone."""
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    async def one(seed):
        stream = await client.completions.create(
            model="tiny", prompt=f"the sun {seed}", max_tokens=10, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        return await asyncio.gather(*map(one, range(20)))

    got = asyncio.run(all_of_them())
    for seed, text in enumerate(got):
        ids = served.model.tokenizer.encode(f"the sun {seed}")
        assert [text] == alone(ids, max_new_tokens=10, seed=seed)[0]
    cache = served.model.worker.engine.cache
    assert cache.num_free == cache.num_pages
