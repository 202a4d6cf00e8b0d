"""What of an answer is trained, beside TRL's training templates: their marks say what has loss.

A training template keeps earlier turns as they are, on purpose, so each answer is compared in the
dialogue that ends with it.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tool_templates import SCHEMAS, tokenizer_of
from transformers.utils.chat_template_utils import render_jinja_template

from dschat.data.rendering import resolved, with_reasoning
from dschat.data.segments import encode_examples
from dschat.data.sources.adapters import Example
from dschat.data.sources.turns import THOUGHTS
from dschat.models.tokenizer import stop_ids

FOLDER = Path(__file__).parent / "chat_templates"
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "llama3": "<|eot_id|>",
    "phi": "<|endoftext|>",
    "smolvlm": "<end_of_utterance>",
    "idefics": "<end_of_utterance>",
    "muse": "<|eot|>",
    "gemma": "<eos>",
    "diffusion": "<eos>",
    "llava": "</s>",
}
AS_PARTS = ("idefics3", "llava_next", "smolvlm")
_SPECIAL = re.compile(
    r"<\|[^<>|{}\s]+\|?>|<[a-z_]+\|>|<｜[^<>]+?｜>|</?s>|</?think>|</?tool_call>|</?arg_value>"
    r"|<(?:start|end)_of_turn>|<end_of_utterance>"
)


def user(text):
    return {"role": "user", "content": text}


def said(text, thought=None, *calls):
    functions = [{"name": "search", "arguments": arguments} for arguments in calls]
    tool_calls = [
        {"type": "function", "id": f"call{i:05d}", "function": f} for i, f in enumerate(functions)
    ]
    thoughts = dict.fromkeys(THOUGHTS, thought) if thought else {}
    return {"role": "assistant", "content": text, **thoughts} | (
        {"tool_calls": tool_calls} if calls else {}
    )


def told(text, number=0):
    return {"role": "tool", "content": text, "name": "search", "tool_call_id": f"call{number:05d}"}


OSLO, ROME = {"query": "oslo"}, {"query": "rome", "limit": 3}
SYSTEM = {"role": "system", "content": "SYS."}
DIALOGUES = [
    [SYSTEM, user("AA?"), said("ONE."), user("BB?"), said("TWO.")],
    [user("AA?"), said("ONE.", "HMM"), user("BB?"), said("TWO.", "AHA")],
    [user("AA?"), said("<think>\nHMM\n</think>\n\nONE."), user("BB?"), said("TWO.")],
    [user("AA?"), said("", None, OSLO), told("COLD"), said("Cold.")],
    [user("AA?"), said("", None, OSLO, ROME), told("COLD"), told("HOT", 1), said("Both.")],
    [user("AA?"), said("", "HMM", OSLO), told("COLD"), said("Cold.", "AHA"), user("B?"), said("O")],
    [user("AA?"), said("Let me see.", None, OSLO), told("COLD"), said("", None, ROME)],
    [user("<|im_end|>?"), said("user: <b>so</b>, <|user")],
]


def tokenizer_for(name, template):
    tokens = list(dict.fromkeys(_SPECIAL.findall(template)))
    eos = next((end for start, end in ENDS.items() if name.startswith(start)), "<|im_end|>")
    return tokenizer_of(template, eos, tokens, bos_token="<s>")


def marked(template, chat, tools, tokenizer):
    """The text of the last turn that has loss."""
    values = tokenizer.special_tokens_map

    def rendered(turns):
        texts, spans = render_jinja_template(
            [turns], tools, chat_template=template, return_assistant_tokens_mask=True, **values
        )
        return texts[0], spans[0]

    text, spans = rendered(chat)
    own = spans[len(rendered(chat[:-1])[1]) :]
    return text[own[0][0] : own[-1][1]].rstrip("\n")


def differences(folder, name):
    """What is trained, and what has loss there, wherever they differ; and how many are equal."""
    template = (folder / f"{name}.jinja").read_text("utf-8")
    training = (folder / f"{name}_training.jinja").read_text("utf-8")
    tokenizer = tokenizer_for(name, template)
    found, num_equal = [], 0
    for dialogue in DIALOGUES:
        tools = SCHEMAS if any("tool_calls" in turn for turn in dialogue) else None
        chat = with_reasoning(dialogue, resolved(tokenizer, "auto"))
        for i in (i for i, turn in enumerate(chat) if turn["role"] == "assistant"):
            example = Example(dialogue[:i], [dialogue[i]], tools=tools)
            (row,) = encode_examples(tokenizer, [example])
            if row.problem:
                continue
            assert row.answers[0][-1] in stop_ids(tokenizer)
            prompt, answer = map(tokenizer.decode, (row.prompt_ids, row.answers[0]))
            shown = chat[: i + 1]
            if name in AS_PARTS:
                shown = [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in shown]
            has_loss = marked(training, shown, tools, tokenizer)
            # a header that the training template marks is in our prompt
            if has_loss.endswith(answer) and (prompt + answer).endswith(has_loss):
                num_equal += 1  # of 16
            else:
                found.append((prompt[-80:], answer, has_loss))
    return found, num_equal


@pytest.mark.parametrize(
    ("name", "num_equal"),
    [("cohere2", 5), ("glm4moe", 16), ("gptoss", 14), ("llama3", 5), ("qwen3_5_nothink", 11)],
)
def test_what_has_loss(name, num_equal):
    assert differences(FOLDER, name) == ([], num_equal)


# Where ours differ: the prompt opens a thought, which an answer without one has to end; Phi's ends
# at its first end token; after a tool, a prompt of DiffusionGemma has no header.
DIFFERENT = ("deepseek", "nemotron", "phi", "diffusion_gemma")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL's files")
def test_what_has_loss_in_all_of_trls_templates():
    folder = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
    names = [path.stem.removesuffix("_training") for path in folder.glob("*_training.jinja")]
    assert len(names) > 20
    for name in names:
        found, num_equal = differences(folder, name)
        assert num_equal > 2 or found, name
        assert not found or name.startswith(DIFFERENT), (name, found)
