"""Episodes with tools: what was sampled is what is trained, whatever tools return."""

import time
from types import SimpleNamespace

import pytest
from episode_runs import limits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import some
from tool_templates import FORMS, HERMES, SCHEMAS, opening, search, tokenizer_of

from dschat.data.rendering import render_chat
from dschat.data.segments import prompt_text_ids
from dschat.environments.episodes import EpisodeRunner
from dschat.environments.sources import load_environment
from dschat.environments.template_text import ObservationTokens
from dschat.inference import SamplingParams
from dschat.inference.requests.sequence import Event
from dschat.inference.requests.stats import GenerationStats
from dschat.user_code.calls import Fault

ASKED = [{"role": "user", "content": "where?"}]
LIMITS = limits_of(8, 100_000, 20.0, 4)
SAMPLING = SamplingParams(20_000)


class ScriptedCore:
    """In place of `Core`: each prompt's next answer is the script's; one a step."""

    def __init__(self, engine):
        self.engine, self.requests = engine, []
        self.stats = GenerationStats(max_num_seqs=1)

    @property
    def has_work(self):
        return bool(self.requests)

    def add_all(self, requests, more):
        self.requests += requests
        self.engine.seen += [request.ids for request in requests]
        return [(requests, more)]

    def step(self):
        answer = self.engine.script.pop(0)
        logprobs = [-0.5] * len(answer)
        request = self.requests.pop(0)
        values = {"answer": answer, "logprobs": logprobs, "stopped": True, "experts": None}
        sequence = SimpleNamespace(request=request, **values)
        return [Event(sequence, answer[-1], logprobs[-1], True)]

    def close(self):
        pass


class ScriptedEngine:
    """``script``: ids of one answer after the other; ``seen``: the prompts of the answers."""

    def __init__(self, script):
        self.script, self.seen = list(script), []

    def core(self):
        return ScriptedCore(self)


def by_character(tokenizer, text):
    """Ids as a model may draw them, and the tokenizer would not."""
    return [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]


def call_text(tokenizer, arguments):
    function = {"name": "search", "arguments": arguments}
    calls = [{"type": "function", "id": "call00000", "function": function}]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    asked = render_chat(tokenizer, ASKED, add_generation_prompt=True, tools=SCHEMAS)
    text = render_chat(tokenizer, [*ASKED, turn], tools=SCHEMAS)[len(asked) :]
    return turn, text[: text.rindex("<eot>")]


def run(tokenizer, script, source, limits=LIMITS, sampling=SAMPLING, begun=None):
    prompt = prompt_text_ids(tokenizer, ASKED, tools=source.schemas)
    engine = ScriptedEngine(script)
    observations = ObservationTokens(tokenizer, is_chat=True)

    def appended(row, text):
        if len(text) > 20:
            raise Fault("too long")
        chat = [{**ASKED[0], "content": ASKED[0]["content"] + text}]
        return prompt_text_ids(tokenizer, chat, tools=source.schemas)

    make = source.maker(tokenizer)
    parts = make, observations, limits, appended, lambda row: begun
    runner = EpisodeRunner(engine, tokenizer, *parts)
    (episode,) = runner.run([prompt], ["where?"], [{}], sampling, [0])
    return episode, engine


@pytest.mark.parametrize("form", some(FORMS, list(FORMS)[:2]))
def test_what_is_trained_is_what_was_sampled(form):
    """The drawn ids stay as drawn, every turn's prompt is the episode so far, and the episode's
    text is the rendered chat, for random texts of tools.
    """
    tokenizer = tokenizer_of(FORMS[form])
    texts = st.text(st.characters(codec="utf-8", exclude_characters="<>[]"), max_size=30)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(texts, min_size=1, max_size=3))
    def check(said):
        results = iter(said)

        def search(query: str, limit: int) -> str:
            """Searches.

            Args:
                query: What to look for.
                limit: How many.
            """
            return next(results)

        source = load_environment(None, [search])
        turn, call = call_text(tokenizer, {"query": "enterators", "limit": 3})
        eos = [tokenizer.eos_token_id]
        answers = [by_character(tokenizer, call) + eos for _ in said]
        answers.append(by_character(tokenizer, "in Rome") + eos)
        episode, engine = run(tokenizer, answers, source)
        assert episode.finish_reason == "stop"
        assert (episode.num_turns, episode.num_calls) == (len(said) + 1, len(said))
        assert not episode.num_failed_calls
        drawn = [t for t, d in zip(episode.tokens, episode.drawn, strict=True) if d]
        assert drawn == [t for answer in answers for t in answer]
        for seen, turns in zip(engine.seen, range(len(answers)), strict=True):
            whole = episode.prompt + episode.tokens
            assert whole[: len(seen)] == seen
            assert whole[len(seen) : len(seen) + len(answers[turns])] == answers[turns]
        chat = list(ASKED)
        for text in said:
            result = {"role": "tool", "name": "search", "content": text}
            chat += [turn, {**result, "tool_call_id": "call00000"}]
        whole = render_chat(tokenizer, chat, add_generation_prompt=True, tools=source.schemas)
        text = tokenizer.decode(episode.prompt + episode.tokens)
        assert text.removesuffix("in Rome<eot>").rstrip(" ") == whole.rstrip(" ")

    check()


def episode_of(tool, limits=LIMITS, sampling=SAMPLING, calls=1):
    tokenizer = tokenizer_of(FORMS["hermes"])
    call = '<tool_call>{"name": "tool", "arguments": {}}</tool_call><eot>'
    script = [by_character(tokenizer, call[:-5]) + [tokenizer.eos_token_id]] * calls
    script.append(tokenizer.encode("done<eot>"))
    source = load_environment(None, [tool])
    episode, _ = run(tokenizer, script, source, limits, sampling)
    gaps = [t for t, drawn in zip(episode.tokens, episode.drawn, strict=True) if not drawn]
    return episode, tokenizer.decode(gaps)


def test_a_result_that_does_not_fit_is_told():
    def tool() -> str:
        """Returns a lot."""
        return "x" * 10**6

    episode, said = episode_of(tool, sampling=SamplingParams(400))
    assert "error: the result is too long, 1000000 characters" in said
    assert (episode.num_failed_calls, episode.finish_reason) == (1, "stop")
    episode, said = episode_of(tool, sampling=SamplingParams(80))
    assert said == ""  # not even that fits
    assert (episode.problem, episode.finish_reason) == ("", "length")


def test_calls_without_end():
    def tool() -> str:
        """Returns."""
        return "again"

    episode, said = episode_of(tool, calls=20)
    assert episode.num_turns == LIMITS.max_turns
    assert episode.finish_reason == "stop"  # no answer is cut


def test_a_tool_that_hangs():
    def tool() -> str:
        """Sleeps."""
        time.sleep(60)
        return ""

    limits = limits_of(8, 1000, 0.2, 1)
    episode, said = episode_of(tool, limits=limits)
    assert "error: did not return within 0.2 s" in said
    assert (episode.problem, episode.finish_reason) == ("", "stop")


class Room:
    """TRL's form: methods are tools, the reward comes at the end."""

    def reset(self, **kwargs):
        self.opened = False
        return " It is dark."

    def open(self) -> str:
        """Opens the window."""
        self.opened = True
        return "light"

    def get_reward(self):
        return 0.5 + self.opened


@pytest.mark.parametrize("opens", [True, False])
def test_an_environment_of_tools(opens):
    tokenizer = tokenizer_of(FORMS["hermes"])
    call = '<tool_call>{"name": "open", "arguments": {}}</tool_call><eot>'
    script = [tokenizer.encode(call)] * opens + [tokenizer.encode("ok<eot>")]
    episode, _ = run(tokenizer, script, load_environment(Room))
    assert "where? It is dark." in tokenizer.decode(episode.prompt)
    assert episode.rewards[-1] == 0.5 + opens
    assert sum(episode.rewards) == 0.5 + opens


@pytest.mark.parametrize("failing", ["reset", "get_reward"])
def test_a_failure_before_or_after_the_answers(failing):
    def fails(self, **kwargs):
        raise ValueError("no luck")

    made = type("Broken", (Room,), {failing: fails})
    tokenizer = tokenizer_of(FORMS["hermes"])
    script = [tokenizer.encode("ok<eot>")]
    episode, _ = run(tokenizer, script, load_environment(made))
    assert episode.problem == "raised ValueError: no luck"


def test_a_text_of_reset_that_does_not_fit():
    made = type("Long", (Room,), {"reset": lambda self: "x" * 30})
    tokenizer = tokenizer_of(FORMS["hermes"])
    episode, _ = run(tokenizer, [], load_environment(made))
    assert episode.problem == "too long"


def test_search_is_described():
    assert load_environment(None, [search]).schemas == SCHEMAS


@pytest.mark.parametrize(
    ("begun", "opens", "count"),
    [(None, True, 0), ("Sure:", True, 1), ("Hm. <think>", False, 0), ("Hm.", False, 2)],
)
def test_calls_in_an_answer_that_its_prompt_begins(begun, opens, count):
    """What was begun says whether the first answer is in a thought; of later ones the template."""
    tokenizer = tokenizer_of(opening(HERMES) if opens else HERMES)
    plain = tokenizer_of(HERMES)
    _, call = call_text(plain, {"query": "a", "limit": 1})
    eos = [tokenizer.eos_token_id]
    answers = [by_character(tokenizer, text) + eos for text in (call, call, "in Rome")]
    episode, _ = run(tokenizer, answers, load_environment(None, [search]), begun=begun)
    assert episode.num_calls == count
