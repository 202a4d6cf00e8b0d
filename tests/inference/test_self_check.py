"""The check before the first rollout: log-probs of decoding against those of plain forwards."""

import pytest
import torch
from families import logprob_gap
from tiny_models import EOS, VOCAB, causal_lm
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.inference.generators import self_check
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.models.heads import LanguageModel


@pytest.fixture
def wrong():
    """A model that computes something else with a cache."""
    model, seen = causal_lm("phi"), []  # tokens in the cache before each forward

    def before(module, args, options):
        caches = [value for value in options.values() if isinstance(value, DynamicCache)]
        seen.append(sum(cache.get_seq_length() for cache in caches))

    def after(module, args, output):
        if seen.pop():
            output.logits = output.logits.roll(1, -1)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)
    return model


def test_a_cache_that_computes_something_else_is_refused(wrong):
    with pytest.raises(UserError, match=r"^PhiForCausalLM cannot generate here: .* another model$"):
        HuggingFaceGenerator(wrong, (EOS,), self_check=True)


def test_log_probs_of_a_rollout_are_those_of_training_whatever_drew_it(wrong):
    prompts = [[5, 6], [7, 8], [9, 10, 11]]
    rollout = HuggingFaceGenerator(wrong, ()).generate(prompts, SamplingParams(8, n=2))
    assert logprob_gap(wrong, prompts, rollout) < 1e-4


def test_a_model_that_generate_refuses_is_refused_in_one_line(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("`model_kwargs` are not used\nby the model")

    model = causal_lm("phi")
    monkeypatch.setattr(model, "generate", refuse)
    with pytest.raises(UserError, match=r"its cache fails \(`model_kwargs` are not used\); use"):
        HuggingFaceGenerator(model, (EOS,), self_check=True)


def test_a_cache_that_fails_is_refused():
    """xLSTM's, in a model whose heads are as wide as it is."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model("xlstm", **sizes, chunk_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UserError, match=r"^xLSTMForCausalLM cannot .* its cache fails \(.*\); use"):
        HuggingFaceGenerator(model, (EOS,), self_check=True)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_device_that_fails_is_not_the_models_fault(error):
    def fail(*_):
        raise error

    model = causal_lm("phi")
    model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(type(error)) as raised:
        HuggingFaceGenerator(model, (EOS,), self_check=True)
    assert raised.value is error


def test_an_error_of_a_user_is_not_the_caches(monkeypatch):
    def refuse(*_):
        raise UserError("lower the limit")

    monkeypatch.setattr(HuggingFaceGenerator, "_requests", refuse)
    with pytest.raises(UserError, match="^lower the limit$"):
        HuggingFaceGenerator(causal_lm("phi"), (EOS,), self_check=True)


def test_logits_that_are_no_numbers_are_refused():
    model = causal_lm("phi")
    model.lm_head.bias.data[3] = torch.nan
    with pytest.raises(UserError, match="log-probs differ by inf nats"):
        HuggingFaceGenerator(model, (EOS,), self_check=True)


@pytest.mark.parametrize(("most", "rows"), [(2048, [3]), (16, [2, 1]), (1, [1, 1, 1])])
@torch.no_grad()
def test_plain_logprobs_are_those_of_rows_alone(most, rows, monkeypatch):
    """A few rows a forward, padded on the right; T divides the logits."""
    model, sizes = causal_lm("gpt_neo").train(), []
    pairs = [([5, 6, 7], [8, 9, 10, 11]), ([20], [21]), ([3, 4], [EOS, 30, 31, 32, 33])]
    monkeypatch.setattr(self_check, "_FORWARD_TOKENS", most)
    plain = LanguageModel(model, packing="off")
    seen = model.transformer.wte.register_forward_hook(lambda _, ids, out: sizes.append(len(out)))
    found = self_check.plain_logprobs(plain, pairs, 1.7)
    seen.remove()
    assert sizes == rows
    assert model.training
    model.eval()
    for (prompt, answer), logprobs in zip(pairs, found, strict=True):
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].double()
        columns = torch.log_softmax(logits / 1.7, -1)[len(prompt) - 1 : -1]
        expected = columns.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected.float(), rtol=0, atol=1e-5)
