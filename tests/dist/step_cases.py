"""The three training steps in small, run the same way by the tests and by the two-process worker.

A `Case` and the folder of tiny checkpoints give a JSON-able dict: losses of every step, and
log-probs or scores that the training form gives to fixed sequences. The trained model is saved into
the case's folder.
"""

import json
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from step_rows import (
    NUM_ITERATIONS,
    PROBES,
    PROMPTS,
    padded_probes,
    rows_of,
    sft_rows,
    text_steps,
)
from tiny_models import EOS, causal_lm
from transformers import set_seed

import dschat.distributed as dist
from dschat.config import RewardConfig, RLHFConfig, SFTConfig
from dschat.hybrid.weight_stream import fill, weight_stream
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.inference.protocol import SamplingParams
from dschat.losses import linear_logprobs
from dschat.models.heads import LanguageModel, ScoreModel
from dschat.models.packing import pack
from dschat.models.packing.model import PackedModel
from dschat.models.tokenizer import ensure_distinct_pad, load_tokenizer, num_ids
from dschat.observability.metrics_log import MetricsLog
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.runtime.deepspeed_engine import sharded_loading, unwrap, zero_settings
from dschat.supervised import loop, setup

MODELS = (
    *("llama", "opt", "opt_350m", "gpt2", "llama_padeos", "llama_reward", "opt_350m_reward"),
    *("mistral", "opt_350m_reward_reversed"),  # a window; re-tokenizes the text
    *("qwen3_5", "nemotron_h", "mixtral", "bamba"),  # ZeRO-3 gathers theirs differently
    "qwen3_moe",  # replays the experts of rollouts
    *("llama_adapted", "gpt2_adapted"),  # reward models whose base is an actor
    "llama_stops",  # answers of a few tokens; two ranks can share its heads
    *("mixtral_heads", "qwen3_moe_heads"),  # and theirs
)
GLOBAL_BATCH = 8
OTHER_CASES = ("rollout", "preference", "balance", "collective", "episode")
OTHER_CASES += ("sequence_parallel", "sampling")


@dataclass(frozen=True)
class Case:
    """One run. ``micro``: rows of a micro-batch; accumulation follows: global batches are the
    same.
    """

    # sft, reward, ppo; dpo, ipo, kto: step 2 with that loss; nan: SFT with a NaN in the second one;
    # skip: SFT without that step; or one of `rollout_cases`.
    step: str
    zero: int = 0
    micro: int = GLOBAL_BATCH
    model: str = "llama"
    reward: str = "llama_reward"
    iterations: int = 2
    shares: tuple[int, ...] = ()  # PPO, rollouts: prompts of each rank; default: equal
    options: tuple[tuple[str, Any], ...] = field(default=())
    rows: str = ""  # of steps 1 and 2; see `training_rows`

    @property
    def name(self) -> str:
        joined = ("offload", "load_in_4bit", "load_in_8bit")
        values = {k: "+".join(v) if k in joined else v for k, v in self.options}
        extras = "_".join(f"{k}-{v}" for k, v in values.items())
        shares = "-".join(map(str, self.shares))
        parts = (
            self.step,
            self.model,
            "" if self.reward == "llama_reward" else self.reward,
            f"z{self.zero}",
            f"m{self.micro}",
            self.iterations,
            shares,
            extras,
            self.rows,
        )
        return "_".join(str(p) for p in parts if p != "")

    def apply_options(self, config: Any) -> None:
        """Set the options of this case; its files lie beside this module."""
        for name, value in self.options:
            if name.endswith("deepspeed_config"):
                value = str(Path(__file__).parent / value)
            if name == "reward_fn":
                value = [f"{Path(__file__).with_name('rewards_of_cases.py')}:{value}"]
            if name == "environment":
                value = f"{Path(__file__).with_name('environment_of_cases.py')}:{value}"
            setattr(config, name, value)

    @classmethod
    def from_json(cls, text: str) -> "Case":
        values = json.loads(text)
        values["options"] = tuple((k, v) for k, v in values["options"])
        return cls(**values | {"shares": tuple(values["shares"])})


def training_rows(case: Case) -> list[dict[str, Any]]:
    """The rows of ``case``."""
    return rows_of(case.step, case.rows)


@torch.no_grad()
def probe_logprobs(model: torch.nn.Module) -> list[list[float]]:
    """Log-probs of every token of ``PROBES`` but the first: of packed rows by one of our models, of
    right-padded rows without a mask by another.
    """
    if isinstance(getattr(model, "module", model), PackedModel):
        rows = pack(PROBES, [range(len(row) - 1) for row in PROBES])
        values = model(rows)[0]
        return [values[rows.row_of == i].tolist() for i in range(len(PROBES))]
    ids, mask = padded_probes(EOS)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    values = linear_logprobs(logits, None, None, ids[:, 1:].flatten())[0].view_as(ids[:, 1:])
    return [row[keep].tolist() for row, keep in zip(values, mask[:, 1:], strict=True)]


@torch.no_grad()
def probe_scores(model: torch.nn.Module) -> list[float]:
    """Scores of ``PROBES`` by one of our score models."""
    return model(pack(PROBES, [[len(row) - 1] for row in PROBES])).tolist()


def run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """Collective. Run ``case``; what it saves lies in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    runners = {"ppo": _run_ppo} | dict.fromkeys(("sft", "reward"), _run_supervised)
    runners |= dict.fromkeys(("nan", "skip"), _run_nan)
    for name in OTHER_CASES:
        runners |= import_module(f"{name}_cases").RUNNERS  # NOTE: these import this module
    return runners[case.step](case, models, out)


def _batch_sizes(case: Case) -> dict[str, int]:
    accumulation, rest = divmod(GLOBAL_BATCH, case.micro * dist.world_size())
    assert rest == 0
    return {"gradient_accumulation_steps": accumulation}


def supervised_config(case: Case, models: Path, out: Path, **values: Any) -> SFTConfig:
    """The configuration of step 1 or 2, seeded; also of step 2 on the policy."""
    config = (SFTConfig if case.step in ("sft", "nan", "skip") else RewardConfig)(
        model_name_or_path=str(models / case.model),
        output_dir=str(out),
        zero_stage=case.zero,
        learning_rate=3e-3,
        dtype="fp32",
        num_train_epochs=1,
        max_seq_len=20,
        per_device_train_batch_size=case.micro,
        per_device_eval_batch_size=3,
        report_to=["none"],
        dropout=0.0,
        **_batch_sizes(case),
        **values,
    )
    case.apply_options(config)
    set_seed(config.seed)
    return config


def build_supervised(case: Case, models: Path, out: Path):
    """Engine, task, configuration, files for saving: as `dschat.supervised.run` builds them."""
    config = supervised_config(case, models, out)
    zero = zero_settings(config)
    is_score = isinstance(config, RewardConfig)
    base = setup.read_base(config, "score" if is_score else "lm")
    if is_score:
        ensure_distinct_pad(base.tokenizer)
        with sharded_loading(zero):
            model = base.checkpoint.score_model(
                zero.dtype,
                base.tokenizer.pad_token_id,
                from_base=True,
                num_tokens=num_ids(base.tokenizer),
                dropout=config.dropout,
                weight_bits=zero.weight_bits,
            )
        files = setup.HubFiles(model.config, base.tokenizer)
        wrap, task = ScoreModel, loop.RewardTask()
    else:
        model = setup.load_policy(config, base, zero, config.dropout)
        files = setup.policy_files(config, base, model)
        wrap, task = LanguageModel, loop.SFTTask()
    engine = setup.build_engine(model, config, zero, 5 * int(config.num_train_epochs), wrap)
    return engine, task, config, files


def supervised_metrics(out: Path, *names: str) -> dict[str, list[float]]:
    """What rank 0 has logged under these names, step by step; nothing on the others."""
    if not dist.is_main_process():
        return {}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines if name in line] for name in names}


def _run_supervised(case: Case, models: Path, out: Path) -> dict[str, Any]:
    engine, task, config, files = build_supervised(case, models, out)
    rows = training_rows(case)
    batches = setup.step_batches(config, rows, rows[:7])
    setup.settle_micro_batches(config, engine, task, *batches)
    log = MetricsLog(config.output_dir, config)
    loop.train(engine, task, config, *batches, log)
    log.close()
    engine.eval()
    probe = probe_logprobs(engine) if case.step == "sft" else probe_scores(engine)
    setup.save(engine, config, files)
    return {"probe": probe} | supervised_metrics(out, "loss", "grad_norm", "eval/loss")


def ppo_config(case: Case, models: Path) -> RLHFConfig:
    """4 prompts x 2 samples x 2 rollout batches in mini-batches of 8, twice: four steps."""
    world = dist.world_size()
    config = RLHFConfig(
        actor_model_name_or_path=str(models / case.model),
        critic_model_name_or_path=str(models / case.reward),
        dtype="fp32",
        max_prompt_seq_len=8,
        max_answer_seq_len=6,
        per_device_generation_batch_size=4 // world,
        generation_batches=2,
        num_samples_per_prompt=2,
        per_device_training_batch_size=case.micro,
        ppo_epochs=2,
        actor_learning_rate=1e-3,
        critic_learning_rate=3e-3,
        actor_zero_stage=case.zero,
        critic_zero_stage=case.zero,
        enable_ema=True,
        ema_decay=0.9,
        unsup_coef=0.5,
        missing_eos_penalty=0.3,
        **_batch_sizes(case),
    )
    case.apply_options(config)
    if config.has_teacher:
        config.teacher_model_name_or_path = str(models / config.teacher_model_name_or_path)
    return config


def build_trainer(config: RLHFConfig, ptx: bool = False) -> DeepSpeedPPOTrainer:
    """An engine and its trainer, seeded as the main of step 3 does."""
    set_seed(config.seed)
    tokenizer = load_tokenizer(config.actor_model_name_or_path, "--actor_model_name_or_path")
    engine = DeepSpeedRLHFEngine(
        config.actor_model_name_or_path,
        config.critic_model_name_or_path,
        tokenizer,
        NUM_ITERATIONS,
        config,
    )
    return DeepSpeedPPOTrainer(engine, config, text_steps(config) if ptx else None)


def my_prompts(case: Case, iteration: int, config: RLHFConfig) -> list[list[int]]:
    """This rank's prompts of an iteration: its `case.shares`, or as many as every rank's."""
    count = sum(case.shares) or config.rollout_prompts(dist.world_size())
    start = iteration * count
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(start, start + count)]
    shares = case.shares or (count // dist.world_size(),) * dist.world_size()
    if dist.world_size() == 1:
        return prompts
    first = sum(shares[: dist.rank()])
    return prompts[first : first + shares[dist.rank()]]


_PPO_METRICS = (
    "loss/policy_avg",
    "loss/value_avg",
    "loss/ptx_avg",
    "objective/scores",
    "loss/distill_avg",
    "objective/kl",
    "objective/teacher_kl",
    "objective/entropy",
    "objective/rlhf_reward",
    "policy/grad_norm",
    "val/grad_norm",
    "policy/approxkl_avg",
    "rollout/eos_share",
    "rollout/turns",
    "rollout/environment_tokens",
)


def _run_ppo(case: Case, models: Path, out: Path) -> dict[str, Any]:
    config = ppo_config(case, models)
    trainer = build_trainer(config, ptx=True)
    engine = trainer.engine
    result: dict[str, Any] = {name: [] for name in (*_PPO_METRICS, "rollouts", "advantages", "gap")}
    for iteration in range(case.iterations):
        experience = trainer.generate_experience(my_prompts(case, iteration, config))
        rows = [
            (number, ids[:n], advantages[mask].tolist())
            for number, ids, n, advantages, mask in zip(
                experience.numbers.tolist(),
                experience.input_ids.tolist(),
                experience.lengths,
                experience.advantages,
                experience.answer_mask,
                strict=True,
            )
        ]
        rows = sorted(sum(dist.gather_objects(rows), []))
        result["rollouts"].append([ids for _, ids, _ in rows])
        result["advantages"].append([advantages for *_, advantages in rows])
        trainer.train_rlhf(experience)
        result["gap"].append(trainer.metrics["rollout/logprob_gap"])
        for name in set(_PPO_METRICS) & set(trainer.metrics):
            result[name].append(trainer.metrics[name])
    engine.actor.eval()
    result["probe"] = probe_logprobs(engine.actor)
    if engine.critic is not None:
        engine.critic.eval()
        result["critic_probe"] = probe_scores(engine.critic)
    if engine.has_reference:
        with torch.no_grad(), engine.reference() as reference:
            result["ref_probe"] = probe_logprobs(reference)
    average = causal_lm(case.model)
    fill(average, weight_stream(unwrap(engine.actor), dist.device(), engine.ema.shards()))
    result["ema_probe"] = probe_logprobs(average)
    with engine.ema_mode() as generator:
        greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
        answers = generator.generate(PROBES, greedy)
    oracle = HuggingFaceGenerator(average, engine.stop_ids)
    assert answers.token_ids == oracle.generate(PROBES, greedy).token_ids
    engine.save(out)
    return result


def _run_nan(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """Three SFT steps, a NaN in one micro-batch of the last rank at the second; or two of them."""
    engine, task, config, _ = build_supervised(case, models, out)
    batches, _ = setup.step_batches(config, sft_rows(), [])
    steps = list(batches.epoch(0))[:3]
    applied, moved = [], []
    for number, rows in enumerate(steps):
        if number == 1 and case.step == "skip":
            continue
        before = _checksum(engine)
        poisoned = number == 1 and dist.rank() == dist.world_size() - 1
        task_of_step = _Poisoned(task) if poisoned else task
        _, step = loop.train_step(engine, task_of_step, rows, batches.size)
        applied.append(step.outcome == "applied")
        moved.append(_checksum(engine) != before)
    engine.eval()
    return {"applied": applied, "moved": moved, "probe": probe_logprobs(engine)}


def _checksum(engine: Any) -> list[float]:
    return [float(t.double().sum()) for _, t in weight_stream(unwrap(engine), dist.device())]


class _Poisoned:
    """A task whose first micro-batch has a loss of NaN."""

    def __init__(self, task: Any) -> None:
        self._task, self._calls = task, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, model: Any, batch: Any) -> Any:
        total, sums = self._task.loss(model, batch)
        self._calls += 1
        return (total * float("nan") if self._calls == 1 else total), sums
