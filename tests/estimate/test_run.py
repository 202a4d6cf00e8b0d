"""Requests, log lines and ``train.py --plan``."""

from dataclasses import replace

import forked
import pytest
from estimates import estimated
from python_process import environment

from dschat.config import RLHFConfig, UserError
from dschat.estimate import PlanRequest
from dschat.estimate.devices import Device
from dschat.estimate.report import line, log_lines, make_estimator, tables
from dschat.launch.supervisor import preflight_lines


@pytest.mark.slow
def test_step_3_is_estimated_from_the_base_models(opt):
    steps = {
        1: {"model_name_or_path": opt("1.3b"), "output_dir": "OUT/step1_sft"},
        2: {"model_name_or_path": "OUT/step1_sft", "output_dir": "OUT/step2_reward"},
        3: {
            "actor_model_name_or_path": "OUT/step1_sft",
            "critic_model_name_or_path": "OUT/step2_reward",
        },
    }
    request = PlanRequest(steps, 1, 1, 80.0)
    assert PlanRequest.from_json(request.to_json()) == request
    assert request.base_models == {opt("1.3b")}
    done = make_estimator(request)(3)
    assert isinstance(done.config, RLHFConfig)
    assert done.models[0].startswith("actor: 1,315,758,080 parameters")
    assert any(line.startswith("reward: 1,3") for line in done.models)


def test_what_a_cpu_keeps_and_which_prompts_share(tiny):
    fields = {"actor_model_name_or_path": tiny("llama"), "per_device_generation_batch_size": 8}
    fields |= {"advantage_estimator": "grpo", "reward_fn": ["length"], "max_prompt_seq_len": 96}
    fields |= {"max_answer_seq_len": 32, "per_device_training_batch_size": 8}
    training = []
    for samples, size in ((1, 8), (8, 8), (8, 4)):
        given = {"num_samples_per_prompt": samples, "per_device_training_batch_size": size}
        modes = estimated(fields | given, gib=40).modes
        training += [mode.items for mode in modes if mode.name == "training"]
    several, one, half = (items["activations"] for items in training)
    assert one < 0.6 * several  # a prompt once for its eight answers: 352 tokens of 1,024
    assert half > 0.4 * several  # four answers a step are of four prompts
    assert all("kept by malloc" not in items for items in training)
    here = make_estimator(PlanRequest({3: fields}, 1, 1))(3)
    assert len({mode.items["activations"] for mode in here.modes}) == 1  # of the largest pass
    assert here.peak.items["kept by malloc"] >= 0.7 * here.peak.items["activations"]


@pytest.mark.slow
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
    done = estimated(fields, num_processes=64)
    items = done.peak.items
    total = 65_719_701_504  # parameters of transformers' OPT-66B
    share = -(-total // 64)
    assert items["actor weights"] == items["reference weights"] == 2 * share
    critic = -(-331_196_928 // 64)
    assert items["optimizer states"] == pytest.approx(12 * (share + critic), rel=1e-3)
    assert items["rollout copy"] == pytest.approx(2 * total / 8, rel=1e-3)
    assert done.fits


def test_a_step_fits_that_device_and_host_have_room_for(tiny):
    fields = {"model_name_or_path": tiny("llama"), "max_seq_len": 32, "offload": ["auto"]}
    done = estimated(fields, number=1)
    device, host = done.peak.total, done.host.total()
    assert done.host["optimizer states"] > 0
    for there, here, says in (
        (device, host, "fits barely"),
        (device, None, "fits barely"),
        (device - 1, host, "DOES NOT FIT; docs/tuning.md"),
        (2 * device, host - 1, "fits on the device, not in host memory; docs/tuning.md"),
    ):
        small = replace(done, device=Device("cuda", there, here, "a GPU"))
        assert small.fits == says.startswith("fits barely")
        assert says in line(small)


def test_a_tensor_parallel_size_that_does_not_divide_the_heads(tiny):
    fields = {"actor_model_name_or_path": tiny("llama"), "critic_model_name_or_path": tiny("llama")}
    refused = "--inference_tp_size 2 does not divide the model's 1 key-value heads"
    with pytest.raises(UserError, match=refused):
        estimated(fields | {"inference_tp_size": 2}, num_processes=2)


def test_an_estimate_that_fails_is_one_line(opt, monkeypatch):
    """A run continues without an estimate: of an architecture whose forward needs values, and of a
    model that is not local.
    """

    def fail(*_):
        raise RuntimeError("no meta kernel\nand more")

    monkeypatch.setattr("dschat.estimate.models.run_pass", fail)
    # of which no other test has estimated the passes
    request = PlanRequest({1: {"model_name_or_path": opt("2.7b")}}, 1, 1, 80.0)
    (said,) = log_lines(request)
    assert said.startswith("no plan: step 1: ")
    assert said.endswith("cannot be planned: no meta kernel")
    monkeypatch.setattr("dschat.estimate.models.shape_of", fail)
    with pytest.raises(UserError, match="cannot be planned: no meta kernel"):
        tables(request)  # --plan: one line, not a traceback
    nothing = PlanRequest({1: {"model_name_or_path": "nobody/nothing"}}, 1, 1)
    (said,) = preflight_lines(nothing, {})
    assert said.startswith("no plan:")
    assert "nobody/nothing" in said
    with pytest.raises(UserError, match="nobody/nothing: no such folder"):
        tables(nothing)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (False, "no such model on the hub"),
        (OSError("no address\nmore"), "the hub: no address"),
    ],
)
def test_a_model_that_the_hub_does_not_have_is_refused_at_once(monkeypatch, answer, reason):
    """Before the process that imports torch; a model that it has goes there."""
    asked = []

    def file_exists(_, name, file):
        asked.append((name, file))
        if isinstance(answer, OSError):
            raise answer
        return answer or "there" in name

    monkeypatch.setattr("huggingface_hub.HfApi.file_exists", file_exists)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("dschat.launch.supervisor.subprocess", None)
    with pytest.raises(UserError, match=f"^facebook/opt-1.3bb: no such folder, and {reason}; che"):
        preflight_lines(PlanRequest({1: {"model_name_or_path": "facebook/opt-1.3bb"}}, 1, 1), {})
    assert asked == [("facebook/opt-1.3bb", "config.json")]
    cached = {"is/cached": "config.json"}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, _: cached.get(name))
    for name in ["is/cached", *([] if isinstance(answer, OSError) else ["is/there"])]:
        with pytest.raises(AttributeError):  # the process
            preflight_lines(PlanRequest({1: {"model_name_or_path": name}}, 1, 1), {})


def test_hours_are_those_of_gpus(monkeypatch):
    """Without a GPU the plan is of this machine's memory; an H100's has its hours here too."""
    monkeypatch.setattr("dschat.distributed.has_gpu", lambda: False)
    fields = {"model_name_or_path": "builtin/tiny", "max_steps": 9}
    request = PlanRequest({1: fields}, 1, 1, price=4.0)
    here = tables(request)
    assert "on the memory available on this machine" in here
    last = "memory only; for hours and dollars name a GPU with --plan_device"
    assert here.splitlines()[-1].strip() == last
    for gib in (None, 40.0):
        gpu = replace(request, device_memory_gib=gib, device_name="H100-80")
        there = tables(gpu)
        assert f"on a GPU of {gib or 80:g} GiB (H100-80)" in there
        assert " on 1 x H100-80:" in there
        assert there.splitlines()[-1].startswith("  9 steps: ")


@pytest.mark.slow  # tests of wrong inputs run that process too
def test_the_preflight_process_returns_the_line():
    fields = {"model_name_or_path": "builtin/tiny", "gradient_checkpointing": True}
    (said,) = preflight_lines(PlanRequest({1: fields}, 1, 1, 0.9), environment())
    assert said.startswith("plan: step 1: training (")
    assert " of 0.9 GiB: " in said


@pytest.mark.slow
def test_plan_command():
    """``train.py --plan``: a table, nothing written, 0 whether it fits or not."""
    command = ["--plan", "--output-dir", "out", "--num-gpus", "1", "--step", "1"]
    done = forked.run("train.py", *command, "--device-memory-gib", "0.76")
    assert (done.code, done.stderr, done.left) == (0, "", [])
    title = "step 1: one process, on a GPU of 0.76 GiB"
    for text in (title, "DOES NOT FIT; docs/tuning.md says what to change"):
        assert text in done.stdout
