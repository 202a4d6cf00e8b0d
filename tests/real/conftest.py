"""Two pretrained models, which `make test-real` makes; without their folders tests are skipped."""

import sys
from pathlib import Path

import pytest
import real_models

sys.path.insert(0, str(Path(__file__).parent))

# As Gemma's chat models have it; its base model has the tokens and no template.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def found(name: str) -> Path:
    path = real_models.CACHE / name
    if not path.exists():
        pytest.skip(f"{path} is not there; make test-real makes it")
    return path


@pytest.fixture(scope="session", params=[*real_models.MODELS])
def folder(request) -> Path:
    """Each of the models."""
    return found(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return found("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def template(folder, tmp_path_factory) -> str | None:
    """The file of the chat template, for a model that has none."""
    if (folder / "chat_template.jinja").exists():
        return None
    path = tmp_path_factory.mktemp("template") / "gemma.jinja"
    path.write_text(GEMMA)
    return str(path)


@pytest.fixture(scope="session")
def checkpoint(folder):
    from dschat.models.checkpoint import Checkpoint

    return Checkpoint(str(folder), "--model_name_or_path")


@pytest.fixture(scope="session")
def tokenizer(checkpoint, template):
    """The model's, as training completes it."""
    return checkpoint.tokenizer(chat_template=template)


@pytest.fixture(scope="module")
def module(folder):
    """The model in transformers: never to be changed."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
