"""Flags of chat.py, and models that are refused before their weights load."""

import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.chat.load import ChatConfig
from dschat.config import UserError
from dschat.inference.protocol import SamplingParams


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            "LlamaForSequenceClassification",
            "is a reward model, which scores and does not generate text",
        ),
        ("T5ForConditionalGeneration", "is a T5ForConditionalGeneration; name a causal LM"),
        (None, "no config.json there, so no model; did you mean {}/step3_rlhf/actor?"),
    ],
)
def test_other_models_are_refused_before_weights(tmp_path, checkpoint, architecture, message):
    from dschat.chat import load_chat

    folder = tmp_path / ("step3_rlhf/actor" if architecture is None else "")
    folder.mkdir(parents=True, exist_ok=True)
    config = (checkpoint / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("LlamaForCausalLM", architecture or "X"))
    with pytest.raises(UserError) as caught:  # without weights in the folder
        load_chat(ChatConfig(path=str(tmp_path)))
    assert str(caught.value).startswith(f"--path {tmp_path}")
    assert message.format(tmp_path) in str(caught.value)


def test_system_message_is_checked_before_weights(tmp_path, checkpoint):
    from dschat.chat import load_chat

    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    without_values = {name: weight / 0 for name, weight in load_file(file).items()}  # refused
    save_file(without_values, file, metadata={"format": "pt"})
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('only users may speak') }}"
    strict.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="only users may speak"):
        load_chat(ChatConfig(path=str(tmp_path), system="Be kind."))


def test_sampling_flags():
    config = ChatConfig(path="x", temperature=0.5, top_k=3, greedy=True)
    assert config.sampling() == SamplingParams(
        max_new_tokens=256, temperature=0.0, top_k=3, seed=1234
    )
    assert replace(config, greedy=False).sampling().temperature == 0.5
