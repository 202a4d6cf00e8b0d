"""Embeddings and tokenizers of different sizes: growing, ties, padding and saving."""

import json
from contextlib import nullcontext

import pytest
import torch
from quick import each_once
from safetensors.torch import load_file
from step_cases import probe_logprobs
from tiny_models import EOS, VOCAB, causal_lm, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dschat.checkpoint.hf_export import export_hf
from dschat.config import UserError
from dschat.hybrid.weight_stream import weight_stream
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.inference.protocol import SamplingParams
from dschat.models.checkpoint import Checkpoint
from dschat.models.lora import add_lora
from dschat.models.tokenizer import (
    load_tokenizer,
    match_vocabulary,
    num_ids,
    same_ids,
    same_tokens,
    stop_ids,
)
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen, sharded_loading, unwrap

FLAG, FP32, CPU = "--model_name_or_path", torch.float32, torch.device("cpu")
NEW = 3
FAMILIES = ["llama", "llama_tied", "opt_350m", "gpt2", "bloom", "gpt_neox"]
STAGES = pytest.mark.parametrize("stage", [0, 3])


def scope(stage):
    return sharded_loading(ZeroSettings(3, FP32)) if stage == 3 else nullcontext()


def grown(path, stage, num_tokens=VOCAB + NEW):
    with scope(stage):
        model = Checkpoint(path, FLAG).language_model(FP32, num_tokens=num_tokens)
    return initialize_frozen(model, ZeroSettings(stage, FP32))


def assert_alike(model, other, tolerance=1e-5):
    flat = [sum(probe_logprobs(each), []) for each in (model, other)]
    assert flat[0] == pytest.approx(flat[1], abs=tolerance)


def weights_of(model):
    return {name: tensor.clone() for name, tensor in weight_stream(unwrap(model), CPU)}


@pytest.mark.parametrize(("name", "stage"), each_once(FAMILIES, [0, 3]))
def test_new_rows_are_the_mean_and_the_old_ones_stay(name, stage, tiny):
    model, plain = grown(tiny(name), stage), causal_lm(name)
    before, after = dict(plain.named_parameters()), weights_of(model)
    assert set(before) == set(after), "a tie was lost"
    moved = {k for k in before if before[k].shape != after[k].shape}
    tied = plain.config.tie_word_embeddings
    assert len(moved) == (1 if tied else 2)
    for key in before:
        old = before[key].detach()
        torch.testing.assert_close(after[key][: len(old)], old, rtol=0, atol=0)
        if key in moved:
            mean = old.double().mean(0).float().expand(NEW, *old.shape[1:])
            torch.testing.assert_close(after[key][len(old) :], mean, rtol=1e-6, atol=1e-7)
    assert unwrap(model).config.vocab_size == VOCAB + NEW
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, VOCAB + 1]]), use_cache=False).logits
    assert logits.shape[-1] == VOCAB + NEW


@STAGES
@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_grown_model_is_saved_as_others_load_it(name, stage, tiny, tmp_path, caplog):
    config = Checkpoint(tiny(name), FLAG).config  # the checkpoint's own, which step 1 saves
    model = grown(tiny(name), stage)
    with caplog.at_level("WARNING", "dschat"):
        match_vocabulary(config, unwrap(model).config, frozen=True)
        match_vocabulary(config, unwrap(model).config, frozen=True)  # same size: no warning
    warnings = [text for text in caplog.messages if "NEW TOKENS ARE NOT TRAINED" in text]
    assert warnings == caplog.messages[-1:]
    stream = weight_stream(unwrap(model), CPU)
    export_hf(tmp_path / "out", stream, unwrap(model), config, tokenizer(), (EOS,))
    stored = load_file(tmp_path / "out/model.safetensors")
    assert sum(VOCAB + NEW in t.shape for t in stored.values()) == 1, "tied is one tensor on disk"
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == VOCAB + NEW
    assert_alike(loaded.eval(), model)


def test_a_tie_survives_growing_lora_merge_and_reload(tiny, tmp_path):
    model = Checkpoint(tiny("llama_tied"), FLAG).language_model(FP32, num_tokens=VOCAB + NEW)
    wrapped = add_lora(model, 4, 0, ["all-linear"], True, "--x").eval()
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    stream = weight_stream(wrapped, CPU)
    export_hf(tmp_path / "out", stream, wrapped, model.config, tokenizer(), (EOS,))
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    loaded = Checkpoint(tmp_path / "out", FLAG).language_model(FP32).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_alike(loaded, wrapped, 1e-4)


def test_actor_and_reference_grow_alike(tiny):
    torch.manual_seed(1)
    first = weights_of(grown(tiny("llama"), 0))
    torch.manual_seed(2)
    second = weights_of(grown(tiny("llama"), 0))
    assert all(torch.equal(first[name], second[name]) for name in first)


@STAGES
def test_padded_embeddings_stay_as_they_are(stage, tiny):
    """More rows than ids, as in Qwen and Pythia: the embedding does not shrink."""
    model = grown(tiny("llama"), stage, num_tokens=VOCAB - 10)
    assert unwrap(model).config.vocab_size == VOCAB
    assert weights_of(model)["lm_head.weight"].shape[0] == VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_beyond_the_tokenizer_are_never_drawn(temperature):
    model = causal_lm("llama")
    model.lm_head.weight.data[60:] *= 30  # the padding rows would nearly always win
    plan = SamplingParams(max_new_tokens=12, temperature=temperature, n=4, min_new_tokens=2)
    free = HuggingFaceGenerator(model, (EOS,)).generate([[5, 6], [7]], plan)
    assert any(token >= 60 for ids in free.token_ids for token in ids)
    bound = HuggingFaceGenerator(model, (EOS,), num_tokens=60).generate([[5, 6], [7]], plan)
    assert all(token < 60 for ids in bound.token_ids for token in ids)
    assert min(map(len, bound.token_ids)) >= 2
    # training computes the log-softmax over all rows
    ids, scale = bound.token_ids[0], temperature or 1.0
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, *ids]])).logits[0, 1:-1] / scale
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    assert bound.logprobs[0] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-4)


# -- padding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pad_id", "stage"), each_once([VOCAB, 32_000, -1, None, EOS], [0, 3]))
def test_any_pad_id_loads(pad_id, stage, tiny, tmp_path):
    model = causal_lm("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": pad_id}))
    loaded = grown(tmp_path, stage, VOCAB + 1)
    expected = pad_id if pad_id in (VOCAB, EOS) else None
    assert unwrap(loaded).config.pad_token_id == expected
    with torch.no_grad():
        loaded(input_ids=torch.tensor([[VOCAB, 5]]))
    with scope(stage):
        score = Checkpoint(tmp_path, FLAG).score_model(
            FP32, VOCAB, from_base=True, num_tokens=VOCAB + 1
        )
    assert (score.config.pad_token_id, score.config.vocab_size) == (VOCAB, VOCAB + 1)


def test_a_row_that_transformers_zeroes_stays(tmp_path):
    """Youtu's pad row, which its tied head trains: as stored, here and in what is saved."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("youtu", **sizes, **heads, pad_token_id=1, eos_token_id=EOS)
    model = AutoModelForCausalLM.from_config(config)
    model.model.embed_tokens.weight.data[1] = 3.0
    model.save_pretrained(tmp_path)
    loaded = Checkpoint(tmp_path, FLAG).language_model(FP32)
    assert loaded.get_output_embeddings().weight[1].tolist() == [3.0] * 32
    match_vocabulary(config, loaded.config)
    config.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.model.embed_tokens.weight[1].tolist() == [3.0] * 32


def test_eos_trains_if_it_is_also_the_pad(tiny):
    """As padding_idx its embedding would get no gradient."""
    model = Checkpoint(tiny("llama_padeos"), FLAG).language_model(FP32)
    model(torch.tensor([[5, EOS, 6]])).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad[EOS].abs().sum() > 0


# -- tokenizers ------------------------------------------------------------------------------------


def saved_tokenizer(folder, **special):
    made = tokenizer()
    for name, token in special.items():
        setattr(made, name, token)
    made.save_pretrained(folder)
    return str(folder)


def rendered(loaded, role="user", **options):
    chat = [{"role": role, "content": "w5"}]
    return loaded.apply_chat_template(chat, tokenize=False, **options)


def test_a_tokenizer_without_pad_uses_eos(tmp_path):
    loaded = load_tokenizer(saved_tokenizer(tmp_path, pad_token=None), FLAG)
    assert loaded.pad_token_id == EOS
    assert len(loaded) == VOCAB


def test_a_bare_vocabulary_loads_the_base_models_tokenizer(tmp_path):
    """DeepSpeed-Chat saved vocab files without special tokens; config.json names the base model."""
    causal_lm("opt").config.save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    file, origin = tmp_path / "config.json", saved_tokenizer(tmp_path / "origin")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"_name_or_path": origin}))
    assert load_tokenizer(str(tmp_path), FLAG).get_vocab() == tokenizer().get_vocab()
    file.write_text(json.dumps(config | {"_name_or_path": "nobody/origin"}))
    with pytest.raises(UserError, match="it has only a vocabulary.*nobody/origin.*copy that"):
        load_tokenizer(str(tmp_path), FLAG)


def test_an_end_of_turn_token_is_added_once_and_kept(tmp_path):
    path = saved_tokenizer(tmp_path / "a")
    loaded = load_tokenizer(path, FLAG, eot_token="<|endoftext|>")
    assert loaded.eos_token == "<|endoftext|>"
    assert (loaded.eos_token_id, num_ids(loaded)) == (VOCAB, VOCAB + 1)
    assert loaded("w5<|endoftext|>")["input_ids"] == [5, VOCAB]
    assert loaded.decode([5, VOCAB], skip_special_tokens=True) == "w5"
    assert stop_ids(loaded, None) == (VOCAB,)
    loaded.save_pretrained(tmp_path / "b")
    for eot in (None, "<|endoftext|>"):
        again = load_tokenizer(str(tmp_path / "b"), FLAG, eot_token=eot)
        assert (again.eos_token_id, num_ids(again)) == (VOCAB, VOCAB + 1)
    known = load_tokenizer(path, FLAG, eot_token="w9")  # a regular token before
    assert (known.eos_token_id, num_ids(known)) == (9, VOCAB)


def test_a_template_that_contains_eos_gets_the_new_one(tmp_path):
    path = saved_tokenizer(
        tmp_path,
        chat_template="{% for m in messages %}{{ m['content'] + '<eos>' }}{% endfor %}",
    )
    loaded = load_tokenizer(path, FLAG, eot_token="<|im_end|>")
    assert rendered(loaded, "assistant") == "w5<|im_end|>"


def test_a_tokenizer_without_eos_needs_eot_token(tmp_path):
    path = saved_tokenizer(tmp_path, eos_token=None)
    with pytest.raises(UserError, match=f"^{FLAG} .* has no EOS token; .*--eot_token"):
        load_tokenizer(path, FLAG)
    assert load_tokenizer(path, FLAG, eot_token="<|eot|>").eos_token_id == VOCAB


def test_the_template_is_saved_with_the_tokenizer(tmp_path):
    path = saved_tokenizer(tmp_path / "a")
    loaded = load_tokenizer(path, FLAG)
    loaded.save_pretrained(tmp_path / "b")
    others = AutoTokenizer.from_pretrained(tmp_path / "b")
    text = rendered(others, add_generation_prompt=True)
    assert text == "\n\nHuman: w5\n\nAssistant:"
    assert load_tokenizer(str(tmp_path / "b"), FLAG).chat_template == loaded.chat_template


def test_a_template_from_a_file(tmp_path):
    path, file = saved_tokenizer(tmp_path / "a"), tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    loaded = load_tokenizer(path, FLAG, chat_template=str(file))
    assert rendered(loaded) == "[w5]"
    file.write_text("{% for m in messages %}")
    with pytest.raises(UserError, match="^--chat_template .*own.jinja cannot render a chat"):
        load_tokenizer(path, FLAG, chat_template=str(file))
    with pytest.raises(UserError, match="^--chat_template nowhere cannot be read"):
        load_tokenizer(path, FLAG, chat_template="nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\0junk", "its chat_template.jinja cannot be read .*; copy or download it again"),
        (b" \n", "the chat template is empty; restore it"),
    ],
)
def test_a_damaged_template_is_named(content, message, tmp_path):
    path = saved_tokenizer(tmp_path / "a")
    (tmp_path / "a/chat_template.jinja").write_bytes(content)
    with pytest.raises(UserError, match=f"^{FLAG} .*/a: {message}"):
        load_tokenizer(path, FLAG)
    own = tmp_path / "own.jinja"
    own.write_text("")
    with pytest.raises(UserError, match="^--chat_template .*own.jinja: the chat template is empty"):
        load_tokenizer(saved_tokenizer(tmp_path / "b"), FLAG, chat_template=str(own))


def test_tokenizers_are_compared_by_their_output(tmp_path):
    one = load_tokenizer(saved_tokenizer(tmp_path / "a"), FLAG)
    other = load_tokenizer(saved_tokenizer(tmp_path / "elsewhere"), FLAG)
    assert same_ids(one, other)
    assert same_tokens(one, other)
    other.add_tokens(["extra"])  # as step 2 adds a pad token
    assert same_tokens(one, other)
    assert not same_ids(other, one)
    other.chat_template = "{{ messages[0]['content'] }}"
    assert same_ids(one, other)
    assert not same_tokens(one, other)
    other.chat_template = None
    assert same_tokens(one, other)
    other.eos_token = "w5"
    assert not same_ids(one, other)


def test_ids_with_gaps_need_a_row_for_the_largest():
    class Sparse:
        def get_vocab(self):
            return {"a": 0, "b": 9, "c": 4}

    assert num_ids(Sparse()) == 10
