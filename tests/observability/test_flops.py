"""FLOPs against hand counts and PyTorch's counter; peak memory."""

import dataclasses

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dschat.observability import flops
from dschat.observability.flops import ModelShape

# q 16x32, k and v 16x16 each, o 32x16; gate, up and down 16x24 each
LLAMA = ModelShape(2, 16, 16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24, 0, 50, 32, 16, 16)


def tiny_model(family: str) -> torch.nn.Module:
    """A randomly initialized model; eager attention, so that every product is visible."""
    configs = {
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=50,
        ),
        "opt": lambda: transformers.OPTConfig(
            hidden_size=32,
            ffn_dim=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            word_embed_proj_dim=16,
            vocab_size=60,
            max_position_embeddings=64,
            dropout=0.0,
            do_layer_norm_before=False,
        ),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=24, n_layer=2, n_head=3, vocab_size=40, n_positions=64
        ),
        "bloom": lambda: transformers.BloomConfig(
            hidden_size=24, n_layer=2, n_head=3, vocab_size=40
        ),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(
            hidden_size=24,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=3,
            vocab_size=40,
        ),
    }
    config = configs[family]()
    config.pad_token_id = 1
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.train()


def generation_flops(prompt_len: int, answer_len: int) -> int:
    prefill = flops.prefill_flops(LLAMA, prompt_len)
    return prefill + flops.decode_flops(LLAMA, prompt_len, answer_len)


def counted_flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


# ---- shapes


def test_shape_of_llama_and_opt_and_gpt2():
    assert flops.shape_of(tiny_model("llama")) == LLAMA
    assert flops.shape_of(tiny_model("opt")) == ModelShape(
        3, 32, 4 * 32**2 + 2 * 32 * 40, 2 * 16 * 32, 60, 32, 32, embed_dim=16
    )
    assert flops.shape_of(tiny_model("gpt2")) == ModelShape(2, 24, 12 * 24**2, 0, 40, 24, 24, 24)


# ---- FLOPs by hand


def test_generation_by_hand():
    # prompt of 3, answer of 4: inputs are three prompt tokens and three answer tokens
    layer = 2 * (16 * 32 + 16 * 16 + 16 * 16 + 32 * 16 + 3 * 16 * 24)
    pairs = 1 + 2 + 3 + 4 + 5 + 6
    expected = 2 * (6 * layer + 2 * (8 + 8) * 4 * pairs) + 4 * 2 * 16 * 50
    assert generation_flops(3, 4) == expected
    one_token = flops.transformer_flops(LLAMA, 3, head="none") + 2 * 16 * 50
    assert generation_flops(3, 1) == one_token


def test_iteration_by_hand():
    critic = ModelShape(1, 8, 4 * 64 + 2 * 128, 0, 50, 8, 8, 8)

    def actor_forward(tokens: int) -> int:
        return 2 * (tokens * 5376 + 64 * tokens * (tokens + 1)) + tokens * 1600

    def critic_forward(tokens: int) -> int:
        # q, k, v, o 8x8; two MLP matrices 8x16; two heads of 4; a head of one number
        layer = 2 * (4 * 64 + 2 * 128)
        return tokens * layer + 2 * 8 * 2 * tokens * (tokens + 1) // 2 + tokens * 16

    assert flops.transformer_flops(LLAMA, 5) == actor_forward(5)
    phases = flops.rlhf_iteration_flops(
        LLAMA,
        critic,
        critic,
        [3, 3],
        [2, 4],
        ppo_epochs=2,
        critic_gradient_checkpointing=True,
    )
    generate = generation_flops(3, 2) + generation_flops(3, 4)
    score = 2 * (actor_forward(5) + actor_forward(7) + critic_forward(5) + critic_forward(7))
    train_actor = 2 * 3 * (actor_forward(5) + actor_forward(7))
    # recomputation skips the head: 4 passes, minus one of the score head
    train_critic = 2 * 4 * (critic_forward(5) + critic_forward(7)) - 2 * (5 + 7) * 16
    train = train_actor + train_critic
    assert phases == {
        "generate": generate,
        "score": score,
        "train": train,
        "effective": generate + score + train,
    }


def test_iteration_shares_prefill_and_can_skip_the_actor():
    lens = ([4, 4, 6, 6], [1, 5, 2, 3])
    each = flops.rlhf_iteration_flops(LLAMA, LLAMA, LLAMA, *lens)
    shared = flops.rlhf_iteration_flops(LLAMA, LLAMA, LLAMA, *lens, num_samples_per_prompt=2)
    saved = flops.prefill_flops(LLAMA, 4) + flops.prefill_flops(LLAMA, 6)
    assert each["generate"] - shared["generate"] == saved
    assert each["train"] == shared["train"]
    warm_up = flops.rlhf_iteration_flops(LLAMA, LLAMA, LLAMA, *lens, train_actor=False)
    seq_lens = [p + a for p, a in zip(*lens, strict=True)]
    assert warm_up["train"] == sum(flops.training_flops(LLAMA, n, head="score") for n in seq_lens)
    teacher = dataclasses.replace(LLAMA, num_layers=5)
    taught = flops.rlhf_iteration_flops(LLAMA, None, None, *lens, teacher=teacher)
    alone = flops.rlhf_iteration_flops(LLAMA, None, None, *lens)
    passes = sum(flops.transformer_flops(teacher, n) for n in seq_lens)
    assert taught["score"] - alone["score"] == passes


def test_tflops_per_s():
    assert flops.tflops_per_s(6e12, 2.0, num_devices=3) == pytest.approx(1.0)
    assert flops.tflops_per_s(6e12, 0.0) == 0.0


# ---- FLOPs against PyTorch's counter


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bloom", "gpt_neox"])
def test_forward_and_training_match_the_flop_counter(family):
    seq_len = 9
    model = tiny_model(family)
    shape = flops.shape_of(model)
    ids = torch.arange(2, 2 + seq_len).unsqueeze(0)

    with torch.no_grad():
        forward = counted_flops(lambda: model(ids, use_cache=False))
    assert forward == flops.transformer_flops(shape, seq_len, causal=False)

    training = counted_flops(lambda: model(ids, use_cache=False).logits.sum().backward())
    assert training == flops.training_flops(shape, seq_len, causal=False)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_gradient_checkpointing_matches_the_flop_counter(family):
    model = tiny_model(family)
    # transformers 5.23's name for it, or the one before
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    shape = flops.shape_of(model)
    ids = torch.arange(2, 11).unsqueeze(0)

    def step() -> None:
        # Early stop skips the last product of each layer if its output is not needed.
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            model(ids, use_cache=False).logits.sum().backward()

    expected = flops.training_flops(shape, 9, gradient_checkpointing=True, causal=False)
    assert counted_flops(step) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_base_matches_the_flop_counter(family):
    """Frozen matrices above a trainable embedding, as above LoRA's first adapter."""
    model = tiny_model(family)
    shape = flops.shape_of(model)
    # The head is tied to the embedding in GPT-2: give it its own, frozen, matrix.
    head = torch.nn.Linear(shape.hidden, shape.vocab, bias=False)
    model.set_output_embeddings(head)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    ids = torch.arange(2, 11).unsqueeze(0)
    counted = counted_flops(lambda: model(ids, use_cache=False).logits.sum().backward())
    expected = flops.training_flops(shape, 9, frozen_base=True, causal=False)
    assert counted == expected


def test_decode_step_matches_the_flop_counter():
    model = tiny_model("gpt2").eval()
    shape = flops.shape_of(model)
    ids = torch.arange(2, 11).unsqueeze(0)
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        step = counted_flops(lambda: model(ids[:, 8:], past_key_values=cache, use_cache=True))
    # An answer of two tokens takes one step, whose query sees 8 cached keys and its own.
    assert step == flops.decode_flops(shape, prompt_len=8, answer_len=2)


def test_score_head_matches_the_flop_counter():
    config = tiny_model("opt").config
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    ids = torch.arange(2, 9).unsqueeze(0)
    with torch.no_grad():
        counted = counted_flops(lambda: model(ids, use_cache=False))
    expected = flops.transformer_flops(flops.shape_of(model), 7, "score", causal=False)
    assert counted == expected
