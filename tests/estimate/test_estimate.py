"""Memory estimates: by hand, against measured peaks and published sizes, and as a command."""

import inspect
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from dschat import estimate
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.estimate import Request, report, rollout, zero
from dschat.estimate.activations import run_pass
from dschat.estimate.advice import _changes, advise
from dschat.estimate.device import GIB, Device
from dschat.estimate.models import Models, Use
from dschat.estimate.run import log_lines, make_estimator
from dschat.estimate.zero import Held, training_bytes
from dschat.launch import preflight_process
from dschat.runtime.deepspeed_engine import ZeroSettings

ROOT = Path(__file__).resolve().parents[2]

# hidden size, layers, heads, width of the embedding, norm before attention: OPT's table of sizes
# (Zhang et al. 2022, arXiv 2205.01068, table 1); the MLP is four times as wide.
OPT = {
    "350m": (1024, 24, 16, 512, False),
    "1.3b": (2048, 24, 32, 2048, True),
    "2.7b": (2560, 32, 32, 2560, True),
    "6.7b": (4096, 32, 32, 4096, True),
    "13b": (5120, 40, 40, 5120, True),
    "30b": (7168, 48, 56, 7168, True),
    "66b": (9216, 64, 72, 9216, True),
    "small": (1024, 8, 16, 1024, True),  # not in the table; with a smaller vocabulary
}


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """``opt("2.7b")``: a folder with only that OPT's configuration."""
    folder = tmp_path_factory.mktemp("opt")

    def make(size: str) -> str:
        hidden, layers, heads, embedding, norm_before = OPT[size]
        path = folder / f"opt-{size}"
        path.mkdir(exist_ok=True)
        config = {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 4096 if size == "small" else 50272,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ffn_dim": 4 * hidden,
            "word_embed_proj_dim": embedding,
            "do_layer_norm_before": norm_before,
            "max_position_embeddings": 2048,
        }
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return make


def estimated(fields: dict, number: int = 3, num_processes: int = 1, gib: float = 80.0):
    """The estimate of one step on a GPU of ``gib``, and the function that made it."""
    request = Request({number: fields}, num_processes, num_processes, gib)
    make = make_estimator(request)
    return make(request.config(number)), make


# -- arithmetic, by hand ---------------------------------------------------------------------------

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def training(stage: int, dtype: torch.dtype, processes: int, trained: int = 1000, **knobs):
    """1000 parameters, the largest tensor has 400, on a CPU (which allocates used buckets only)."""
    settings = ZeroSettings(stage, dtype, **knobs)
    return training_bytes(1000, trained, 400, settings, processes, on_gpu=False)


# (stage, dtype, processes): weights, masters + moments, per gradient, partition, gradients held.
# fp32: 4 bytes per weight; ZeRO-0 has no masters and 8 bytes of moments; from ZeRO-1 on 4 + 8 for
# this process's partition of 1000 or 125. bf16 raises the stage to 2 at least.
BY_HAND = {
    (0, FP32, 1): (4000, 8000, 4, 0, 0),
    (0, FP32, 8): (4000, 8000, 4, 0, 0),
    (1, FP32, 1): (4000, 12000, 4, 0, 0),
    (1, FP32, 8): (4000, 1500, 4, 0, 0),
    (2, FP32, 1): (4000, 12000, 4, 4000, 0),
    (2, FP32, 8): (4000, 1500, 4, 500, 0),
    (3, FP32, 1): (4000, 12000, 0, 0, 4000),
    (3, FP32, 8): (500, 1500, 0, 0, 500),
    (0, BF16, 1): (2000, 12000, 2, 4000, 0),
    (0, BF16, 8): (2000, 1500, 2, 500, 0),
    (2, BF16, 1): (2000, 12000, 2, 4000, 0),
    (2, BF16, 8): (2000, 1500, 2, 500, 0),
    (3, BF16, 1): (2000, 12000, 0, 0, 4000),
    (3, BF16, 8): (250, 1500, 0, 0, 500),
    (0, FP16, 8): (2000, 1500, 2, 0, 0),
    (2, FP16, 8): (2000, 1500, 2, 250, 0),
}


@pytest.mark.parametrize("case", BY_HAND, ids=lambda c: f"zero{c[0]}-{str(c[1])[6:]}-x{c[2]}")
def test_weights_gradients_and_optimizer_by_hand(case):
    t = training(*case)
    optimizer = t.masters + t.moments
    computed = t.weights, optimizer, t.per_gradient, t.partition, t.gradients
    weights, states, per_gradient, partition, gradients = BY_HAND[case]
    assert computed == (Held(weights), Held(states), per_gradient, partition, Held(gradients))


def test_lora_by_hand():
    """100 of 1000 parameters train: only they have states and gradients."""
    t = training(0, FP32, 8, trained=100)
    assert (t.weights, t.moments) == (Held(4000), Held(800))
    assert t.update == (400, 400)  # gradients, and their flat copy during the reduction
    t = training(3, BF16, 8, trained=100)  # 13 of 100 to each of 8 processes; 125 of 1000
    assert (t.weights, t.masters + t.moments, t.gradients) == (Held(250), Held(156), Held(52))


def test_offload_by_hand():
    """Masters, moments, gradients and a 16-bit copy are on the host, 125 elements of each."""
    t = training(2, BF16, 8, offload_optimizer=True)
    assert t.masters + t.moments == Held(0, 1500)
    assert t.gradients == Held(800, 125 * 6 + 800)  # plus a buffer of one tensor on each side
    assert t.weights == Held(2000)
    t = training(3, BF16, 8, offload_optimizer=True, offload_parameters=True)
    assert (t.weights, t.gradients) == (Held(0, 250), Held(0, 1000))
    assert t.gathered == 2000  # a pass gathers the weights of all processes


def test_a_gpu_holds_the_whole_bucket():
    t = training_bytes(1000, 1000, 400, ZeroSettings(2, BF16), 1, on_gpu=True)
    assert t.backward == 2 * 500_000_000
    small = {"zero_optimization": {"reduce_bucket_size": 600}}
    t = training_bytes(1000, 1000, 400, ZeroSettings(2, BF16, overrides=small), 1, on_gpu=True)
    assert t.reduces_early
    assert t.backward == t.reduction[1] == 2 * 600 + 2 * 600 + 4 * 400


def test_constants_are_those_of_the_libraries():
    defaults = DeepSpeedZeroConfig(stage=3)
    names = {"stage3_max_live_parameters": "max_live_parameters"}
    for name, value in zero.BUCKET_DEFAULTS.items():
        assert getattr(defaults, names.get(name, name)) == value
    from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE

    from dschat.hybrid import rollout_form as hybrid
    from dschat.hybrid.weight_stream import Buckets
    from dschat.inference.hf_generator import HuggingFaceGenerator

    assert zero.ALLREDUCE_BUCKET == MEMORY_OPT_ALLREDUCE_SIZE
    assert hybrid._COPY_SHARE == rollout.COPY_SHARE
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert Buckets().max_bytes == rollout.STAGING[here]
    rows = inspect.signature(HuggingFaceGenerator).parameters["max_num_seqs"].default
    assert rows == rollout.GENERATE_ROWS


# -- activations -----------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Embedding (10, 4), 4 -> 16, ReLU, 16 -> 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 4), nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, input_ids):
        return self.down(self.up(self.embed(input_ids)).relu()).squeeze(-1)


def test_activations_by_hand():
    """3 x 5 tokens, fp32: 15 x 4 embedded, 15 x 16 hidden, 15 scores, squares and their sum."""
    with torch.device("meta"):
        module = TwoLayers()
    run = run_pass(module, "value", 3, 5, train=True, vocab_size=0)
    tokens = 3 * 5 * 4  # bytes of one number per token
    # Forward: ReLU reads the hidden state and writes another, then the first is freed.
    forward = tokens * (4 + 16 + 16)
    # Backward: saved tensors (embedded, hidden, scores, loss) and the gradients of ReLU's output
    # and input; the gradients of the scores and of the last layer are already freed.
    backward = tokens * (4 + 16 + 16 + 16)
    activations, logits, gradients = run.peak(0, False, None)
    assert logits == gradients == 0
    assert forward <= backward <= activations <= backward + 2 * tokens + 16 * 4
    num_trained = 10 * 4 + 4 * 16 + 16 + 16 + 1
    assert run.phases[-1].num_done == num_trained
    assert run.peak(4, True, None)[2] == 4 * num_trained
    assert run.peak(0, False, retained=10**6)[0] == 10**6  # from other passes
    forward_only = run_pass(module, "value", 3, 5, train=False, vocab_size=0)
    assert forward_only.peak(0, False, None)[0] == tokens * (16 + 16)  # the embeddings are freed


@pytest.mark.parametrize("checkpointing", [False, True])
def test_extrapolation_from_few_layers_is_exact(opt, checkpointing, monkeypatch):
    config = json.loads(Path(opt("350m"), "config.json").read_text())
    config |= {"num_hidden_layers": 9, "hidden_size": 64, "ffn_dim": 256, "vocab_size": 4096}
    folder = Path(opt("350m")).parent / "nine"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"word_embed_proj_dim": 32}))
    use = Use(str(folder), "--x", "lm", FP32, gradient_checkpointing=checkpointing)
    quick = Models().run(use, "policy", 4, 64, train=True)
    monkeypatch.setattr("dschat.estimate.models._SHALLOW", 100)
    whole = Models().run(use, "policy", 4, 64, train=True)
    assert len(quick.phases) < len(whole.phases)
    for per_gradient in (0, 2, 4):
        for retained in (None, 0):
            args = (per_gradient, False, retained)
            assert quick.peak(*args) == whole.peak(*args)
    assert quick.small == whole.small


def test_attention_memory_is_linear_in_the_length(opt):
    """Twice the length, twice the activations: no (T, T) matrix."""
    use = Use(opt("350m"), "--x", "lm", BF16)
    short, long = (
        Models().run(use, "sft", 1, length, train=True).phases[0] for length in (512, 1024)
    )
    head = 512 * 50272 * 2  # bytes of its gradient, independent of the length
    assert long.live - head == pytest.approx(2 * (short.live - head), rel=0.01)
    assert long.logits == 2 * 1024 * 50272 * 2  # and their gradient


FAMILIES = ("llama", "opt", "opt_350m", "gpt2", "gpt_neox", "bloom", "mistral", "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_estimated(tiny, family):
    name = tiny(family)
    fields = {
        "actor_model_name_or_path": name,
        "reward_model_name_or_path": name,
        "actor_gradient_checkpointing": True,
        "max_prompt_seq_len": 16,
        "max_answer_seq_len": 16,
        "critic_lora_dim": 4,
    }
    done, _ = estimated(fields)
    with torch.device("meta"):
        import tiny_models

        actor = tiny_models.CONFIGS[family]()
        size = sum(p.numel() for p in torch.nn.Module.parameters(_meta_lm(actor)))
    assert done.peak.items["actor weights"] == 2 * size
    assert done.fits


def _meta_lm(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


# -- against measurements and published sizes ------------------------------------------------------


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """``peaks(size, step)``: result of the benchmark; its baselines are measured once."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import plan_against_peaks as benchmark

    work, baselines = tmp_path_factory.mktemp("peaks"), {}
    benchmark.write_texts(work)

    def compare(size: str, step: int) -> dict:
        if step not in baselines:
            benchmark.save_models(work / "negligible", benchmark.NEGLIGIBLE)
            baselines[step] = benchmark.measured_peak(work, "negligible", step)
        benchmark.save_models(work / size, benchmark.SIZES[size])
        return benchmark.compare(work, size, step, baselines[step])

    yield compare
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("size", ["llama-22m", "opt-60m", "opt-125m"])
def test_against_measured_peaks(peaks, size, step):
    result = peaks(size, step)
    assert abs(result["off"]) < 0.15, result


PUBLISHED = {  # GPU: GiB, the largest OPT that trains on it, the next size
    "V100 32G": (32, "2.7b", "6.7b"),
    "A6000 48G": (48, "6.7b", "13b"),
    "A100 40G": (40, "6.7b", "13b"),
    "A100 80G": (80, "13b", "30b"),
}


SHARED = Models(by_row=True)


@pytest.mark.parametrize("gpu", PUBLISHED)
def test_largest_model_of_a_gpu(opt, gpu, monkeypatch):
    """DeepSpeed-Chat's table of the largest actor that its hybrid engine trains on a single GPU.

    The table names GPUs and models, but no settings: not ZeRO, offload, LoRA, precision or lengths.
    So this shows that with one setting for all rows, dschat's estimate agrees with all four, for
    the named size and the next; it does not prove that they used it. The setting: fp16 (a V100 has
    no bf16), ZeRO-2 with offloaded optimizer (their --offload), gradient checkpointing, OPT-350M as
    the reward model, all weights trained, and their scripts' 256 + 256 tokens, 16 prompts per
    rollout, in micro-batches of 8. With LoRA and offloaded reference, 30B would fit on an 80 GB
    device too.
    """
    monkeypatch.setattr("dschat.estimate.run.Models", lambda *_, **__: SHARED)
    gib, largest, next_size = PUBLISHED[gpu]
    fits = {}
    for size in (largest, next_size):
        fields = {
            "actor_model_name_or_path": opt(size),
            "reward_model_name_or_path": opt("350m"),
            "dtype": "fp16",
            "actor_zero_stage": 2,
            "critic_zero_stage": 2,
            "offload": True,
            "actor_gradient_checkpointing": True,
            "critic_gradient_checkpointing": True,
            "max_prompt_seq_len": 256,
            "max_answer_seq_len": 256,
            "per_device_generation_batch_size": 16,
            "per_device_training_batch_size": 8,
            "eval_batch_size": 8,
        }
        done, _ = estimated(fields, gib=gib)
        fits[size] = done.peak.total <= done.device.memory  # ignores this machine's host memory
    assert fits == {largest: True, next_size: False}


# -- optional models -------------------------------------------------------------------------------


def rlhf_estimate(tiny, **knobs):
    fields = {
        "actor_model_name_or_path": tiny("llama"),
        "critic_model_name_or_path": tiny("llama"),
        "max_prompt_seq_len": 16,
        "max_answer_seq_len": 16,
    }
    return estimated(fields | knobs)[0]


GRPO = {"advantage_estimator": "grpo", "num_samples_per_prompt": 4}
PROGRAM = {"reward_fn": ["length"], "critic_model_name_or_path": ""}


@pytest.mark.parametrize(
    ("knobs", "absent"),
    [
        ({}, set()),
        (GRPO, {"critic"}),
        (PROGRAM, {"reward"}),
        ({"kl_coef": 0.0}, {"reference"}),
        (GRPO | PROGRAM | {"kl_coef": 0.0}, {"critic", "reference", "reward"}),
        # the actor without adapters is the reference
        (GRPO | PROGRAM | {"actor_lora_dim": 8}, {"critic", "reference", "reward"}),
        # critic, reward model of another checkpoint, and a reward function
        (PROGRAM | {"reward_model_name_or_path": "small"}, set()),
    ],
    ids=lambda value: "-".join(sorted(value)) or "none",  # the same in every process
)
def test_models_that_are_not_loaded_take_no_memory(tiny, knobs, absent):
    if "reward_model_name_or_path" in knobs:
        knobs = knobs | {"reward_model_name_or_path": tiny("llama")}
    done = rlhf_estimate(tiny, **knobs)
    for mode in done.modes:
        loaded = {
            name for name in ("critic", "reward", "reference") if f"{name} weights" in mode.items
        }
        assert loaded == {"critic", "reward", "reference"} - absent, mode.name
    text = " ".join(done.models)
    assert ("critic: " in text) == ("critic" not in absent)
    assert ("reward model: none" in text) == ("reward" in absent)
    needed = "kl_coef" not in knobs
    assert ("reference: none" in text) == (not needed)


def test_memory_of_a_critic(tiny):
    """bf16 on one GPU: masters and moments take 12 bytes per parameter, weights 2."""
    with_critic, without = rlhf_estimate(tiny), rlhf_estimate(tiny, **GRPO)
    sizes = Models().sizes(Use(tiny("llama"), "--x", "score", BF16))
    pair = [
        mode for done in (with_critic, without) for mode in done.modes if mode.name == "scoring"
    ]
    states = [mode.items["optimizer states"] for mode in pair]
    assert states[0] - states[1] == 12 * sizes.total
    assert pair[0].items["critic weights"] == 2 * sizes.total


def pairs_estimate(tiny, **knobs):
    fields = {"model_name_or_path": tiny("llama"), "max_seq_len": 32, "loss": "dpo"}
    return estimated(fields | knobs, number=2)


def test_the_policy_on_pairs_by_hand(tiny):
    """Training takes the memory of SFT with twice the rows, plus a frozen copy if loaded."""
    rows = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 32}
    sft = {"model_name_or_path": tiny("llama"), "max_seq_len": 32} | rows
    plain, _ = estimated(sft, number=1)
    live, _ = pairs_estimate(tiny)
    before, _ = pairs_estimate(tiny, precompute_ref_logprobs=True)
    weights = 2 * Models().sizes(Use(tiny("llama"), "--x", "lm", BF16)).total
    assert before.peak.total == plain.peak.total
    assert live.peak.items["reference weights"] == weights == live.peak.items["model weights"]
    assert live.peak.total == plain.peak.total + weights
    assert not before.peak.items.get("reference weights")
    away, _ = pairs_estimate(tiny, offload_reference_model=True)
    assert away.host["reference weights"] == weights
    lora, _ = pairs_estimate(tiny, lora_dim=8)
    assert not lora.peak.items.get("reference weights")
    lines = [done.models[1] for done in (live, before, lora)]
    assert lines == [
        "reference: a copy of the model",
        "reference: its log-probs, computed before training",
        "reference: the model without adapters",
    ]
    assert estimate.title_of(live.config) == "DPO"
    assert live.number == 2


def test_advice_for_the_policy_on_pairs(tiny):
    """Advises to precompute or offload a loaded reference, but not one that is not loaded."""
    before, _ = pairs_estimate(tiny)
    assert {"precompute_ref_logprobs": True} in [change.fields for change in _changes(before)]
    done, _ = pairs_estimate(tiny, precompute_ref_logprobs=True)
    assert {"precompute_ref_logprobs", "offload_reference_model"}.isdisjoint(
        name for change in _changes(done) for name in change.fields
    )


# -- advice ----------------------------------------------------------------------------------------


def not_fitting(fields: dict, number: int):
    """An estimate for a GPU with 0.8 of the needed memory, and the function that made it."""
    roomy, _ = estimated(fields, number)
    before, make = estimated(fields, number, gib=0.8 * roomy.peak.total / GIB)
    assert not before.fits
    return before, make


def check_advice(before, make):
    """The advice, after a check that each change saves the stated bytes."""
    advice = advise(before, make)
    assert 1 <= len(advice) <= 3
    after = make(replace(before.config, **advice[0].change.fields))
    assert advice[0].saved == before.peak.total - after.peak.total > 0
    saved = sum(entry.saved for entry in advice)
    assert advice[-1].after.peak.total == before.peak.total - saved
    return advice


@pytest.mark.slow
def test_first_advice_saves_the_stated_bytes(opt):
    fields = {
        "actor_model_name_or_path": opt("small"),
        "reward_model_name_or_path": opt("small"),
        "max_prompt_seq_len": 64,
        "max_answer_seq_len": 64,
    }
    before, make = not_fitting(fields, 3)
    advice = check_advice(before, make)
    text = report.table(before, "PPO", advice)
    assert "DOES NOT FIT" in text
    first = advice[0]
    assert f"1. {first.change.flags(3)}: saves {first.saved / GIB:.3g} GiB" in text


@pytest.mark.slow
@pytest.mark.parametrize(("number", "config"), [(1, SFTConfig), (2, RewardConfig)])
def test_advice_of_the_other_steps(opt, number, config):
    fields = {"model_name_or_path": opt("small"), "max_seq_len": 128}
    before, make = not_fitting(fields, number)
    assert isinstance(before.config, config)
    assert f"--step{number}." in check_advice(before, make)[0].change.flags(number)


def test_a_step_that_fits_has_no_advice(opt):
    done, make = estimated({"model_name_or_path": opt("350m")}, number=1)
    assert done.fits
    assert advise(done, make) == []


def test_host_memory_counts(opt):
    fields = {"model_name_or_path": opt("1.3b"), "offload": True, "gradient_checkpointing": True}
    done, _ = estimated(fields, number=1)
    assert done.host["optimizer states"] == 12 * 1_315_758_080
    assert "optimizer states" not in {k for k, v in done.peak.items.items() if v}
    small = replace(done, device=Device("cuda", 80 * GIB, 8 * GIB, "a GPU"))
    assert done.peak.total < small.device.memory
    assert not small.fits
    assert "fits on the device, not in host memory" in report.line(small, [])


# -- requests and the command ----------------------------------------------------------------------


def test_step_3_is_estimated_from_the_base_models(opt):
    steps = {
        1: {"model_name_or_path": opt("1.3b"), "output_dir": "OUT/step1_sft"},
        2: {"model_name_or_path": "OUT/step1_sft", "output_dir": "OUT/step2_reward"},
        3: {
            "actor_model_name_or_path": "OUT/step1_sft",
            "critic_model_name_or_path": "OUT/step2_reward",
        },
    }
    request = Request(steps, 1, 1, 80.0)
    assert Request.from_json(request.to_json()) == request
    assert request.base_models == {opt("1.3b")}
    done = make_estimator(request)(request.config(3))
    assert isinstance(done.config, RLHFConfig)
    assert done.models[0].startswith("actor: 1.316B parameters")
    assert "reward model: 1.316B parameters" in done.models[2]


def test_66b_on_64_devices(opt):
    fields = {
        "actor_model_name_or_path": opt("66b"),
        "reward_model_name_or_path": opt("350m"),
        "actor_zero_stage": 3,
        "critic_zero_stage": 3,
        "actor_gradient_checkpointing": True,
        "critic_gradient_checkpointing": True,
        "inference_tp_size": 8,
        "per_device_generation_batch_size": 16,
        "per_device_training_batch_size": 4,
        "eval_batch_size": 4,
    }
    done, _ = estimated(fields, num_processes=64)
    items = done.peak.items
    total = 65_719_701_504  # parameters of transformers' OPT-66B
    share = -(-total // 64)
    assert items["actor weights"] == items["reference weights"] == 2 * share
    critic = -(-331_196_928 // 64)
    assert items["optimizer states"] == pytest.approx(12 * (share + critic), rel=1e-3)
    assert items["rollout copy"] == pytest.approx(2 * total / 8, rel=1e-3)
    assert done.fits


def test_an_estimate_that_fails_is_one_line(opt, monkeypatch):
    """A run continues without an estimate: of an architecture whose forward needs values, and of a
    model that is not local.
    """

    def fail(*_):
        raise RuntimeError("no meta kernel\nand more")

    monkeypatch.setattr("dschat.estimate.models.run_pass", fail)
    request = Request({1: {"model_name_or_path": opt("350m")}}, 1, 1, 80.0)
    (line,) = log_lines(request)
    assert line.startswith("no plan: step 1: --model_name_or_path")
    assert line.endswith("cannot be planned: no meta kernel")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (line,) = preflight_process.log_lines(
        Request({1: {"model_name_or_path": "nobody/nothing"}}, 1, 1)
    )
    assert line.startswith("no plan:")
    assert "nobody/nothing" in line
    with pytest.raises(UserError, match="nobody/nothing: no such folder"):
        estimate.tables(Request({1: {"model_name_or_path": "nobody/nothing"}}, 1, 1))


@pytest.mark.slow  # tests of wrong inputs run that process too
def test_the_preflight_process_returns_the_line():
    fields = {"model_name_or_path": "builtin/tiny", "gradient_checkpointing": True}
    (line,) = preflight_process.log_lines(Request({1: fields}, 1, 1, 0.9))
    assert line.startswith("plan: step 1: training (")
    assert " of 0.9 GiB: " in line


def test_plan_command(tmp_path, monkeypatch, capsys):
    """``train.py --plan``: a table, nothing written, 0 whether it fits or not."""
    out = tmp_path / "out"
    command = ["train.py", "--plan", "--output-dir", str(out), "--num-gpus", "1"]
    command += ["--step", "1", "--device-memory-gib", "0.76"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command)
    assert runpy.run_path(str(ROOT / "train.py"))["main"]() == 0
    printed, said = capsys.readouterr()
    assert said == ""
    assert "step 1, supervised fine-tuning: one process, on a GPU of 0.76 GiB" in printed
    assert "DOES NOT FIT" in printed
    assert "change first, in this order:\n    1. --step1." in printed
    assert list(tmp_path.iterdir()) == []
