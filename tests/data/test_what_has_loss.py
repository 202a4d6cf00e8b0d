"""Which answers have loss: completions alone, by lists of weights; and prompts, each token once."""

import itertools

import pytest
from byte_tokenizers import CHATML, byte_tokenizer, trained
from data_files import put, sft_rows, step_table
from dialogues import REPLY, SYSTEM, USER
from quick import some

from dschat.config import UserError
from dschat.data.segments import EARLIER, encode_examples
from dschat.data.sources.adapters import Example

END = "<|im_end|>"
CHAT = byte_tokenizer(END, CHATML)
# as Qwen3: thoughts behind the last question only
FORGETS = byte_tokenizer(
    END,
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + CHATML.replace(
        "{{ m['content'] }}",
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m['content'] }}",
    ),
)
TURNS = [USER("a"), REPLY("EARLIER"), USER("b")]


def texts(folder, row, tokenizer=CHAT, **knobs):
    return [trained(tokenizer, made) for made in sft_rows(folder, row, tokenizer, **knobs)]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("completion", [[REPLY("two")], REPLY("two"), "two"])
def test_a_completion_alone_has_loss(tmp_path, completion, form):
    row = {"prompt": TURNS, "completion": completion}
    assert texts(tmp_path, row, form=form) == [["two" + END]]
    assert texts(tmp_path, row, form=form, train_on="all") == [["EARLIER" + END, "two" + END]]
    assert texts(tmp_path, row, form=form, train_on="last") == [["two" + END]]
    ((all_of_it,),) = texts(tmp_path, row, form=form, train_on_prompt=True)
    assert ("EARLIER" + END in all_of_it, all_of_it.endswith("two" + END)) == (True, True)
    (whole,) = sft_rows(tmp_path, {"messages": [*TURNS, REPLY("two")]}, CHAT)
    assert sft_rows(tmp_path, row, CHAT)[0]["input_ids"] == whole["input_ids"]


def test_all_answers_of_a_completion_have_loss(tmp_path):
    said = [REPLY("one"), {"role": "tool", "content": "t"}, REPLY("two")]
    row = {"prompt": TURNS, "completion": said, "label": True}
    assert texts(tmp_path, row) == [["one" + END, "two" + END]]
    empty = "<think>\n\n</think>\n\n"
    assert texts(tmp_path, row, FORGETS) == [[f"{empty}{said}{END}"] for said in ("one", "two")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*TURNS, REPLY("two")]},
        {"prompt": TURNS, "response": "two"},
        {"prompt": TURNS, "chosen": [REPLY("two")]},
        {"instruction": "b", "input": "", "output": "two", "history": [["a", "EARLIER"]]},
    ],
)
def test_elsewhere_all_answers_have_loss(tmp_path, row):
    assert texts(tmp_path, row) == [["EARLIER" + END, "two" + END]]
    assert texts(tmp_path, row) == texts(tmp_path, row, train_on="all")


def test_a_completion_without_loss_is_a_bad_row(tmp_path):
    row = {"prompt": TURNS, "completion": [{**REPLY("two"), "weight": 0}]}
    with pytest.raises(UserError, match="an answer that is empty, unreadable or of weight 0"):
        texts(tmp_path, row)


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_answers_before_a_result_of_a_tool_count_once(tmp_path, train_on_prompt):
    """The template keeps them until the next question; each answer has a row of its own."""
    result = {"role": "tool", "content": "t"}
    said = [REPLY("CALL"), result, REPLY("AGAIN"), result, REPLY("one"), USER("b"), REPLY("two")]
    rows = texts(
        tmp_path, {"messages": [USER("a"), *said]}, FORGETS, train_on_prompt=train_on_prompt
    )
    whole = "".join(itertools.chain(*rows))
    assert [whole.count(text) for text in ("CALL", "AGAIN", "one", "two")] == [1] * 4


# -- lists of weights


@pytest.mark.parametrize("mask", [(0, 0, 0, 1), (1, 1, 1, 0), (0, 1, 0, 1), (1, 0, 1, 0)])
def test_a_loss_mask_has_a_number_per_turn_of_prompt_and_completion(tmp_path, mask):
    row = {"prompt": TURNS, "completion": [REPLY("two")], "loss_mask": mask}
    chat = {"messages": [*TURNS, REPLY("two")], "loss_mask": mask}
    expected = [t + END for t, m in (("EARLIER", mask[1]), ("two", mask[3])) if m]
    for given in (row, {**row, "completion": "two"}, chat):
        if expected:
            assert texts(tmp_path, given) == [expected]
        else:
            with pytest.raises(UserError, match="of weight 0"):
                texts(tmp_path, given)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_loss_mask_of_another_length_is_a_bad_row(tmp_path, form):
    row = {"prompt": TURNS, "completion": [REPLY("two")], "loss_mask": [0, 1]}
    with pytest.raises(UserError, match="a loss_mask of 2 numbers for 4 turns"):
        texts(tmp_path, row, form=form)
    assert len(step_table(put(tmp_path / f"r.{form}", [row]), CHAT, "rlhf")) == 1
    text = {"question": "q", "answer": "two", "loss_mask": [1, 1, 1]}
    with pytest.raises(UserError, match="a loss_mask of 3 numbers for 2 turns"):
        texts(tmp_path, text, form=form)
    assert texts(tmp_path, {**text, "loss_mask": [0, 1]}, form=form) == [["two" + END]]
    with pytest.raises(UserError, match="of weight 0"):
        texts(tmp_path, {**text, "loss_mask": [1, 0]}, form=form)
    assert texts(tmp_path, {**text, "loss_mask": 7}, form=form) == [["two" + END]]


# -- prompts with loss

CUTS = byte_tokenizer(
    END, CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
)


TEMPLATES = {"plain": CHAT, "forgets": FORGETS, "cuts": CUTS}
WEIGHTS = [weights for weights in itertools.product([0, 1], repeat=3) if any(weights)]
QUICK = [("auto", "forgets", (0, 1, 1)), ("last", "cuts", (1, 0, 1)), ("all", "plain", (0, 1, 0))]


@pytest.mark.parametrize(
    ("train_on", "template", "weights"),
    some(itertools.product(["auto", "all", "last"], TEMPLATES, WEIGHTS), QUICK),
)
def test_with_its_prompts_each_turn_of_a_dialogue_counts_once(
    tmp_path, train_on, template, weights
):
    tokenizer, thought = TEMPLATES[template], template != "plain"
    turns = [SYSTEM("RULE")]
    for i, weight in enumerate(weights):
        said = f"<think>\nhm{i}\n</think>\n\nsaid{i}" if thought else f"said{i}"
        turns += [USER(f"ask{i}"), {**REPLY(said), "weight": weight}]
    trained_up_to = max(i for i, weight in enumerate(weights) if weight)
    rows = texts(tmp_path, {"messages": turns}, tokenizer, train_on_prompt=True, train_on=train_on)
    whole = "".join(itertools.chain(*rows))
    assert whole.count("RULE") == 1
    for i, weight in enumerate(weights[: trained_up_to + 1]):
        assert whole.count(f"ask{i}") == 1
        assert whole.count(f"said{i}") == weight
        assert whole.count(f"hm{i}") == (weight if thought else 0)
    ends = len(turns[: 2 * trained_up_to + 3]) - weights[: trained_up_to + 1].count(0)
    assert whole.count(END) == ends


def test_with_its_prompts_the_result_of_a_tool_counts_once(tmp_path):
    """The template, as gpt-oss's, takes a tool's name from the call before its result."""
    template = FORGETS.chat_template.replace(
        "{{ m['content'] }}",
        "{% if m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('no call') }}{% endif %}"
        "{{ ns.name + ':' }}{% endif %}{{ m['content'] }}{% for c in m.tool_calls or [] %}"
        "{% set ns.name = c.function.name %}{{ c.function | tojson }}{% endfor %}",
    )
    call = {"tool_calls": [{"function": {"name": "search", "arguments": {"for": "oslo"}}}]}
    turns = [USER("ask"), {**REPLY(""), **call}, {"role": "tool", "content": "COLD"}]
    row = {"messages": [*turns, REPLY("said0"), USER("more"), REPLY("said1")]}
    tokenizer = byte_tokenizer(END, template)
    rows = texts(tmp_path, row, tokenizer, train_on_prompt=True)
    whole = "".join(itertools.chain(*rows))
    assert len(rows) == 3
    for text in ("ask", "oslo", "search:COLD", "said0", "more", "said1"):
        assert whole.count(text) == 1


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_a_greeting_is_no_answer(tmp_path, train_on_prompt):
    """It is a part of the first prompt."""
    said = [REPLY("WELCOME"), USER("ask"), REPLY("one"), USER("more"), REPLY("two")]
    rows = texts(tmp_path, {"messages": said}, FORGETS, train_on_prompt=train_on_prompt)
    whole = "".join(itertools.chain(*rows))
    assert len(rows) == 2
    assert [whole.count(text) for text in ("one", "two")] == [1, 1]
    assert [whole.count(t) for t in ("WELCOME", "ask", "more")] == [train_on_prompt] * 3


def test_with_a_template_that_changes_texts_answers_count_once(tmp_path):
    """Where the last answer ends is not found: the prompt behind it has no loss."""
    template = FORGETS.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] | upper if m.role == 'user' else m['content'] }}"
    )
    row = {"messages": [USER("ask"), REPLY("said0"), USER("more"), USER(" "), REPLY("said1")]}
    rows = texts(tmp_path, row, byte_tokenizer(END, template), train_on_prompt=True)
    whole = "".join(itertools.chain(*rows))
    assert [whole.count(t) for t in ("ASK", "said0", "MORE", "said1")] == [1, 1, 0, 1]


@pytest.mark.parametrize("question", ["a", "assistant", "im", "user"])
def test_a_question_that_the_template_has_too(tmp_path, question):
    """In its generation prompt, in the end of a turn, or in the turn's head."""
    row = {"messages": [USER("ask"), REPLY("said0"), USER(question), REPLY("said1")]}
    rows = texts(tmp_path, row, FORGETS, train_on_prompt=True)
    assert "".join(itertools.chain(*rows)).count(f"user\n{question}{END}") == 1


def test_a_prompt_of_another_row_loses_nothing():
    example = Example([USER("a"), REPLY("one"), USER("b")], [REPLY("two")])
    rows = encode_examples(FORGETS, [example], every_answer=True, train_on_prompt=True)
    assert [row.cut for row in rows] == [EARLIER, ""]
