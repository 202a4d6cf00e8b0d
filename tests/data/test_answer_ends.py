"""The end of an answer is one set of ids, in steps 1 to 3 and wherever a score is read."""

import pytest
import torch
from joined_texts import CHATML, GEMMA, KINDS, tokenizer_of
from transformers import GenerationConfig, LlamaConfig, LlamaForSequenceClassification

from dschat.data.preference_rows import pair_rows
from dschat.data.segments import encode_examples, prompt_text_ids
from dschat.data.sources.adapters import Example
from dschat.models.continued_text import continued_texts
from dschat.models.tokenizer import load_tokenizer, stop_ids
from dschat.rlhf.retokenize import Retokenizer

PHI_3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
# Ends thoughts with <s>, calls with <end_of_turn>, a last answer with <|im_end|>
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user:' + m.content + '<s>' }}"
    "{% elif m.tool_calls %}{{ '<|im_start|>assistant:' + "
    "(m.tool_calls[0].function.arguments | tojson) + '<end_of_turn>' }}"
    "{% else %}{{ '<|im_start|>assistant:thinks<s><|im_start|>final:' + m.content }}"
    "{{ '<|im_end|>' if loop.last else '<s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
# As GLM-4.5: a turn begins with its role's token, and no answer has an end of its own
ROLES = (
    "{% set roles = {'user': '<start_of_turn>', 'tool': '<end_of_turn>', "
    "'assistant': '<|im_start|>'} %}{% for m in messages %}{{ roles[m.role] + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
SPACED = ROLES.replace("'<start_of_turn>'", "'\n<start_of_turn>'").replace("<end_of_turn>", "")
# As Command A: two tokens end an answer, and the generation prompt is always there
TWO_ENDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content }}"
    "{{ '<end_of_turn>' if m.role == 'assistant' }}{{ '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant:' }}"
)
NO_END = "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content }}{% endfor %}"
ASKED = [{"role": "user", "content": "what time is it?"}]


def turn(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|im_end|>"]),
        (GEMMA, ["<end_of_turn>"]),
        (PHI_3, ["<|im_end|>"]),
        (GPT_OSS, ["<|im_end|>", "<end_of_turn>"]),
        (ROLES, ["<start_of_turn>", "<end_of_turn>"]),
        (SPACED, []),
        (TWO_ENDS, ["<|im_end|>"]),
        (NO_END, []),
        (None, []),
        ("{{ raise_exception('none') }}", []),
    ],
)
def test_the_set(template, ends):
    tokenizer = tokenizer_of("byte-level", template)
    expected = {*tokenizer.convert_tokens_to_ids(["</s>", *ends])}
    assert {*stop_ids(tokenizer)} == expected
    assert {*stop_ids(tokenizer, GenerationConfig(eos_token_id=[9, 11]))} == expected | {9, 11}


def test_the_set_has_the_checkpoints_ids(tmp_path):
    tokenizer_of("byte-level", CHATML).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[1, 6]).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), "--path")
    assert stop_ids(tokenizer) == (1, 2, 4, 6)
    (row,) = encode_examples(tokenizer, [Example(ASKED, turn("a<s>b"))])
    assert row.answers[0][-1] == 1  # of the template's and the checkpoint's, the first


@pytest.mark.parametrize("template", [CHATML, GEMMA, PHI_3, GPT_OSS, NO_END])
@pytest.mark.parametrize("kind", [*KINDS])
def test_an_answer_ends_with_its_first_end(kind, template):
    tokenizer = tokenizer_of(kind, template)
    example = Example(ASKED, turn("It is five."))
    (row,) = encode_examples(tokenizer, [example])
    ends = stop_ids(tokenizer)
    assert [i in ends for i in row.answers[0]] == [False] * (len(row.answers[0]) - 1) + [True]
    first = {NO_END: "</s>", GEMMA: "<end_of_turn>"}.get(template, "<|im_end|>")
    assert row.answers[0][-1] == tokenizer.convert_tokens_to_ids(first)
    assert continued_texts(tokenizer, row.answers)[0].replace(" .", ".").strip().endswith("five.")


def test_earlier_turns_carry_no_loss_after_their_end():
    tokenizer = tokenizer_of("byte-level", CHATML)
    chat = [*ASKED, *turn("five"), *ASKED]
    (row,) = encode_examples(tokenizer, [Example(chat, turn("six"))])
    assert row.prompt_ids == prompt_text_ids(tokenizer, chat)
    pairs = zip(row.prompt_ids, row.prompt_weights, strict=True)
    assert tokenizer.decode([i for i, t in pairs if t]) == "five<|im_end|>"


def test_a_turns_first_token_ends_the_answer_before_it():
    tokenizer = tokenizer_of("byte-level", ROLES)
    function = {"name": "f", "arguments": {}}
    called = {**turn("a")[0], "tool_calls": [{"type": "function", "function": function}]}
    told = {"role": "tool", "content": "told"}
    call = '\na<call>{"name": "f", "arguments": {}}<end_of_turn>'
    chat = [*ASKED, called, told, *turn("five"), *ASKED]
    (row, *others) = encode_examples(
        tokenizer, [Example(chat, turn("six")), Example(ASKED, [called]), Example(ASKED, turn("b"))]
    )
    assert row.prompt_ids == prompt_text_ids(tokenizer, chat)
    pairs = zip(row.prompt_ids, row.prompt_weights, strict=True)
    assert tokenizer.decode([i for i, t in pairs if t]) == f"{call}\nfive<start_of_turn>"
    answers = [tokenizer.decode(row.answers[0]) for row in (row, *others)]
    assert answers == ["\nsix<start_of_turn>", call, "\nb<start_of_turn>"]
    # an answer without loss has none at its end either
    (row,) = encode_examples(
        tokenizer, [Example([*ASKED, {**turn("x")[0], "weight": 0.0}, *ASKED], turn("y"))]
    )
    assert not any(row.prompt_weights)


@pytest.mark.parametrize("template", [CHATML, GEMMA, PHI_3])
@torch.no_grad()
def test_step_2_and_a_rollout_read_the_same_score(template):
    """A rollout stops at the template's end of turn; step 2's ids end there too."""
    tokenizer = tokenizer_of("byte-level", template)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_labels=1,
            initializer_range=0.4,
            pad_token_id=0,
        )
    ).eval()
    answers = ["It is five.", "No."]
    example = Example(ASKED, *map(turn, answers))
    (pair,) = pair_rows([example], [0], tokenizer, 512, True)
    (end,) = {*stop_ids(tokenizer)} - {tokenizer.eos_token_id}
    retokenizer = Retokenizer(tokenizer, tokenizer, stop_ids(tokenizer))
    for side, answer in zip(("chosen_ids", "rejected_ids"), answers, strict=True):
        drawn = [*tokenizer(answer, add_special_tokens=False)["input_ids"], end]
        asked = prompt_text_ids(tokenizer, ASKED)
        text = retokenizer.sequence(asked, drawn, True, ASKED)
        scores = [
            float(model(torch.tensor([ids])).logits) for ids in (pair[side], asked + drawn, text)
        ]
        assert scores[0] == scores[1] == scores[2]
