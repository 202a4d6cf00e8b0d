"""The user's DeepSpeed file: precedence, "auto", and files that are refused."""

import json
from dataclasses import replace

import pytest

from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError, parser
from dschat.config.deepspeed_json import merged
from dschat.runtime.deepspeed_engine import deepspeed_config, zero_settings

MODELS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "b"}
# What transformers' documentation hands out for ZeRO-3 with everything offloaded.
FROM_TRANSFORMERS = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": False},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.fixture
def file(tmp_path):
    def write(settings, name="ds.json"):
        path = tmp_path / name
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return str(path)

    return write


def settings(config, model=""):
    config.validate()
    return deepspeed_config(zero_settings(config, model))


def test_the_files_part_wins_and_auto_is_ours(file):
    path = file(FROM_TRANSFORMERS)
    config = SFTConfig(
        deepspeed_config=path,
        zero_stage=3,
        lr_scheduler_type="constant_with_warmup",
        dtype="fp32",
        max_grad_norm=0.7,
        gradient_accumulation_steps=4,
    )
    got = settings(config)
    zero = got["zero_optimization"]
    assert zero["sub_group_size"] == 1e9
    assert zero["stage3_gather_16bit_weights_on_model_save"]
    assert "reduce_bucket_size" not in zero  # DeepSpeed's own default
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert got["steps_per_print"] == 2000
    # Ours: the engine hears of one micro-batch a step, and neither optimizer nor schedule.
    assert got["gradient_clipping"] == 0.7
    assert got["train_micro_batch_size_per_gpu"] == got["gradient_accumulation_steps"] == 1
    assert not {"optimizer", "scheduler", "train_batch_size"} & set(got)
    assert "enabled" not in got["fp16"]
    json.dumps(got)


def test_without_a_file_everything_is_ours():
    assert settings(SFTConfig(dtype="fp32"))["zero_optimization"] == {"stage": 0}


def test_a_file_turns_offload_on(file):
    path = file({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}})
    config = SFTConfig(deepspeed_config=path, dtype="fp32", zero_stage=3)
    zero = zero_settings(config)
    assert zero.offload_optimizer
    assert not zero.offload_parameters
    assert deepspeed_config(zero)["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": False,
        "ratio": 0.5,
    }
    path = file({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    raised = zero_settings(SFTConfig(deepspeed_config=path, dtype="fp32"))
    assert raised.used_stage == 2
    assert raised.describe() == "ZeRO-2 in place of 0, optimizer in CPU memory"


def test_offload_to_none_is_no_offload(file):
    none = {"device": "none", "pin_memory": False}
    path = file({"zero_optimization": {"offload_optimizer": none, "offload_param": none}})
    config = SFTConfig(deepspeed_config=path, dtype="fp32", zero_stage=3)
    section = settings(config)["zero_optimization"]
    assert section["stage"] == 3
    assert not {"offload_optimizer", "offload_param"} & section.keys()


def test_agreeing_with_a_flag_is_no_contradiction(file):
    agreed = {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1,
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": False},
        "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}},
        "compile": {"enabled": False},
    }
    config = RewardConfig(
        deepspeed_config=file(agreed),
        zero_stage=2,
        dtype="fp32",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=3,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        num_warmup_steps=5,
    )
    assert settings(config)["zero_optimization"] == {"stage": 2}


def test_auto_precision_follows_the_file(file):
    config = SFTConfig(deepspeed_config=file({"bf16": {"enabled": True}}))
    assert settings(config)["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert settings(SFTConfig(deepspeed_config=file({"bf16": {"enabled": False}}))) == settings(
        SFTConfig(dtype="fp32")
    ) | {"bf16": {"enabled": False}}


def test_one_file_for_both_models_or_each_its_own(file):
    both = file({"zero_optimization": {"reduce_bucket_size": 1000}})
    own = file({"zero_optimization": {"reduce_bucket_size": 2000}}, "critic.json")
    config = RLHFConfig(**MODELS, deepspeed_config=both, dtype="fp32", actor_zero_stage=3)

    def buckets(config):
        return [
            settings(config, model)["zero_optimization"]["reduce_bucket_size"]
            for model in ("actor", "critic")
        ]

    assert buckets(config) == [1000, 1000]
    assert buckets(replace(config, critic_deepspeed_config=own)) == [1000, 2000]
    frozen = zero_settings(config, "actor").frozen(config, "reward")
    assert deepspeed_config(frozen)["zero_optimization"]["reduce_bucket_size"] == 1000


def test_a_frozen_model_is_offloaded_by_its_own_flag_alone(file):
    path = file({"zero_optimization": {"offload_param": {"device": "cpu"}}})
    config = RLHFConfig(**MODELS, actor_deepspeed_config=path, dtype="fp32", actor_zero_stage=3)
    zero = zero_settings(config, "actor")
    assert zero.offload_parameters
    away = replace(config, offload=["frozen"])
    frozen = [deepspeed_config(zero.frozen(c, "reference")) for c in (config, away)]
    assert ["offload_param" in each["zero_optimization"] for each in frozen] == [False, True]
    critic = zero_settings(config, "critic")
    assert critic.frozen(config, "reward").stage == 0
    assert critic.frozen(away, "reward").stage == 3


def zero(**section):
    return {"zero_optimization": section}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("{", {}, "broken JSON at line 1"),
        ("[1]", {}, "must be an object"),
        ({"zero_optimisation": {}}, {}, "no setting zero_optimisation; did you mean zero_opt"),
        ({"zero_optimization": True}, {}, "zero_optimization must be an object"),
        (zero(stage=2), {}, "zero_optimization.stage 2 contradicts --zero_stage 0; .*auto"),
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping 0.5 contradicts --max_grad_norm 1.0"),
        ({"gradient_accumulation_steps": 2}, {}, "contradicts --gradient_accumulation_steps 1"),
        (
            {"train_micro_batch_size_per_gpu": 2},
            {},
            "contradicts --per_device_train_batch_size 16",
        ),
        ({"train_batch_size": 8}, {}, "train_batch_size 8 contradicts .* x 1 processes = 16"),
        ({"bf16": {"enabled": True}}, {"dtype": "fp32"}, "bf16.enabled true .* --dtype fp32"),
        ({"bf16": {"check_grad_overflow": False}}, {}, "dschat needs true, for it skips"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "both enabled; choose one"),
        ({"fp16": True}, {}, "fp16 must be an object"),
        (zero(offload_optimizer="cpu"), {}, "offload_optimizer must be an object"),
        ({"checkpoint": 5}, {}, "no attribute"),
        ({"optimizer": {"type": "Lamb"}}, {}, 'optimizer.type "Lamb" contradicts'),
        ({"optimizer": {"params": {"lr": 1}}}, {}, "optimizer.params.lr 1 .*--learning_rate 1e-05"),
        ({"optimizer": {"params": {"eps": 1}}}, {}, "dschat creates its own AdamW"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "contradicts --lr_scheduler_type cosine"),
        ({"prescale_gradients": True}, {}, "prescale_gradients true: dschat needs false"),
        ({"hybrid_engine": {"enabled": True}}, {}, "--enable_hybrid_engine"),
        ({"pipeline": {"stages": 2}}, {}, "dschat does not use pipeline; take it out"),
        (zero(offload_param={"device": "cpu"}), {}, "offload_param needs --zero_stage 3"),
        (
            zero(offload_param={"device": "nvme", "nvme_path": "/"}),
            {"zero_stage": 3},
            'offload_param.device "nvme": dschat needs "none" or "cpu"',
        ),
        (
            zero(offload_optimizer={"device": "none"}),
            {"offload": ["auto"]},
            "contradicts --offload auto;",
        ),
        (zero(reduce_bucket_sise=5), {}, "has no setting reduce_bucket_sise .*did you mean reduce"),
        (zero(reduce_bucket_size="big"), {}, "reduce_bucket_size: .*integer"),
    ],
    ids=str,
)
def test_wrong_files(content, options, message, file):
    path = file(content)
    with pytest.raises(UserError, match=message) as error:
        settings(SFTConfig(deepspeed_config=path, **options))
    assert str(error.value).startswith(f"--deepspeed_config {path}: ")
    assert "\n" not in str(error.value)


def test_hierarchical_shards_are_for_a_step_of_one_model(file):
    """DeepSpeed: "ZeRO parameter intra parallel group is already initialized"."""
    path = file(zero(zero_hpz_partition_size=2))
    for several in (
        RLHFConfig(**MODELS, deepspeed_config=path, actor_zero_stage=3, dtype="fp32"),
        RewardConfig(deepspeed_config=path, zero_stage=3, loss="dpo", dtype="fp32"),
    ):
        with pytest.raises(UserError, match="zero_hpz_partition_size 2 contradicts a step with"):
            several.validate()
    one = settings(RewardConfig(deepspeed_config=path, zero_stage=3, dtype="fp32"))
    section = one["zero_optimization"]
    assert (section["stage"], section["zero_hpz_partition_size"]) == (3, 2)


def test_a_missing_file_is_named_by_the_flag_that_named_it():
    for flag in ("--deepspeed_config", "--deepspeed"):
        missing = "^--deepspeed_config nowhere.json: No such file.*check the path"
        with pytest.raises(UserError, match=missing):
            parser.parse(SFTConfig, [flag, "nowhere.json"])
    argv = [f"--{name}={value}" for name, value in MODELS.items()]
    with pytest.raises(UserError, match="^--critic_deepspeed_config x.json: No such file"):
        parser.parse(RLHFConfig, [*argv, "--critic_deepspeed_config", "x.json"])


def test_deepspeeds_own_flags_are_accepted(file):
    path = file(zero(reduce_bucket_size=7))
    for argv in (
        ["--deepspeed", "--deepspeed_config", path],
        ["--deepspeed_config", path, "--deepspeed"],
        ["--deepspeed", path],
    ):
        config = parser.parse(SFTConfig, argv)
        assert config.deepspeed_overrides() == zero(reduce_bucket_size=7)
    for alone in (["--deepspeed"], ["--deepspeed=true"], ["--deepspeed", "false"]):
        assert parser.parse(SFTConfig, alone) == SFTConfig()


def test_the_file_is_read_once(file):
    """A file that is edited while the step starts does not change what was checked."""
    path = file(zero(reduce_bucket_size=7))
    config = parser.parse(SFTConfig, ["--deepspeed_config", path, "--dtype", "fp32"])
    file(zero(reduce_bucket_size=8))
    assert zero_settings(config).overrides == zero(reduce_bucket_size=7)
    assert settings(replace(config))["zero_optimization"]["reduce_bucket_size"] == 8


def test_precision_of_two_files_must_agree(file):
    config = RLHFConfig(
        **MODELS,
        actor_deepspeed_config=file({"bf16": {"enabled": True}}),
        critic_deepspeed_config=file({"bf16": {"enabled": False}}, "critic.json"),
    )
    with pytest.raises(UserError, match="ask for bf16 and fp32; .*set --dtype"):
        config.validate()


def test_lower_stages_have_no_shards_to_offload():
    with pytest.raises(UserError, match="--offload params needs --zero_stage 3"):
        SFTConfig(offload=["params"]).validate()


def test_merging_goes_leaf_by_leaf():
    ours = {"a": {"b": 1, "c": 2}, "d": [1, 2]}
    assert merged(ours, {"a": {"b": 3}, "d": [9]}) == {"a": {"b": 3, "c": 2}, "d": [9]}
    assert ours == {"a": {"b": 1, "c": 2}, "d": [1, 2]}
