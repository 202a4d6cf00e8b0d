"""Holds the models of RLHF in one process: actor, reference, critic, reward model and teacher.

Actor and critic train under DeepSpeed, the others are frozen. `rollout_mode` is the
scope in which the actor generates. Losses, advantages and the training loop are the trainer's.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

import dschat.distributed as dist
from dschat.checkpoint.hf_export import export_adapter, export_hf
from dschat.checkpoint.saved_check import probe_values
from dschat.config import RLHFConfig, UserError
from dschat.config.errors import require
from dschat.config.fields import fixed_or_zero
from dschat.hybrid.optimizer_offload import training_states_away
from dschat.hybrid.rollout_form import RolloutForm, RolloutSettings, rollout_form
from dschat.hybrid.vllm_rollout import VLLMRollout
from dschat.hybrid.weight_stream import ShardedEMA, adapter_stream, weight_bytes, weight_stream
from dschat.inference import EngineConfig
from dschat.inference.protocol import Generator
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_tensors import announce_rest
from dschat.models.heads import LanguageModel, ScoreModel, count_parameters
from dschat.models.lora import adapters_off
from dschat.models.packing import pack
from dschat.models.packing.model import PackedModel
from dschat.models.routing import replay_routing
from dschat.models.tokenizer import num_ids
from dschat.models.training_engine import ModelOrEngine, TrainingEngine, without_adapters
from dschat.rlhf.experience import Experience
from dschat.rlhf.initial_checkpoints import InitialCheckpoints, find_checkpoints
from dschat.rlhf.retokenize import Retokenizer
from dschat.runtime.deepspeed_engine import (
    ZeroSettings,
    initialize_frozen,
    trained_engine,
    unwrap,
    zero_settings,
)
from dschat.runtime.hub import write_card
from dschat.runtime.output_dir import check_room

logger = logging.getLogger("dschat")


class DeepSpeedRLHFEngine:
    """Actor, reference, critic, reward model and teacher.

    Attributes:
        actor: a DeepSpeed engine.
        critic: a DeepSpeed engine; None where the advantage estimator needs no critic.
        ref: frozen; None where the KL has no weight, or where the reference is the actor with its
            LoRA adapters off.
        reward: frozen; None where only reward functions score.
        teacher: frozen; None unless ``args.teacher_model_name_or_path`` names one.
        ema: the actor's moving average; None unless ``enable_ema``.
        updates: optimizer steps of an iteration, over which the learning-rate schedules are laid.
        token_budget: tokens of a micro-batch; 0: rows decide, as they do before ``auto`` is
            measured.

    Args:
        actor_model_name_or_path: a causal LM, normally step 1's folder.
        critic_model_name_or_path: a reward model, normally step 2's folder. Critic and reward model
            both start from it, unless ``args.reward_model_name_or_path`` names another reward
            model. None: no reward model, and a critic, if any, that starts from the actor.
        tokenizer: the actor's. For a reward model with another one the text is re-tokenized.
        num_total_iters: rollouts of the whole run, for the learning-rate schedules.
        args: an `RLHFConfig`, or any namespace or dict with some of its fields.
        checkpoints: of these names and ``args``, where `find_checkpoints` has checked them already.

    Raises:
        UserError: a checkpoint that is missing, of the wrong kind or incomplete; an ``output_dir``
            on a disk without space for what `save` writes.
    """

    def __init__(
        self,
        actor_model_name_or_path: str,
        critic_model_name_or_path: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_total_iters: int = 1,
        args: Any = None,
        checkpoints: InitialCheckpoints | None = None,
    ) -> None:
        dist.init()
        self.args = RLHFConfig.from_namespace(args if args is not None else {})
        names = str(actor_model_name_or_path), str(critic_model_name_or_path or "")
        replace(
            self.args, actor_model_name_or_path=names[0], critic_model_name_or_path=names[1]
        ).validate_models()
        if tokenizer is None or getattr(tokenizer, "eos_token_id", None) is None:
            raise UserError(
                f"tokenizer: {type(tokenizer).__name__} has no EOS token; pass the actor's, "
                "AutoTokenizer.from_pretrained(...)"
            )
        warmup = self.args.critic_warmup_steps
        require(
            warmup == 0 or warmup < num_total_iters,
            f"--critic_warmup_steps {warmup} leaves none of {num_total_iters} iterations for the "
            "actor; lower it, or raise --max_steps",
        )
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.checkpoints = checkpoints or find_checkpoints(
            names[0], names[1] or None, self.args, tokenizer
        )
        self.num_iters = num_total_iters
        self.updates = self.args.ppo_epochs * self.args.num_mini_batches
        self._actor_zero = zero_settings(self.args, "actor")
        self._critic_zero = zero_settings(self.args, "critic")
        self.stop_ids = self.checkpoints.stop_ids

        self.actor = self._build_actor()
        is_copied = self.args.needs_reference and not self._is_its_own_reference
        actor = self.checkpoints.actor if is_copied else None
        self.ref = self._frozen("reference", self._actor_zero, actor)
        self.critic = self._build_critic()
        if self.args.output_dir is not None:
            copies = [self.actor] * (self.args.enable_ema + bool(self.args.keep_best))
            models = [*self.trained.values(), *copies]
            check_room(self.args.output_dir, [weight_bytes(unwrap(model)) for model in models])
        self.reward = self._frozen("reward", self._critic_zero, self.checkpoints.reward)
        self.teacher = self._frozen("teacher", self._actor_zero, self.checkpoints.teacher)
        self._retokenizer = None
        if self.checkpoints.reward_tokenizer is not None:
            assert self.checkpoints.reward is not None
            text = self.checkpoints.reward.config.get_text_config()
            longest = getattr(text, "max_position_embeddings", None)
            own, kwargs = self.checkpoints.reward_tokenizer, self.args.chat_template_kwargs
            self._retokenizer = Retokenizer(tokenizer, own, self.stop_ids, longest, kwargs)
        self.ema = (
            ShardedEMA(unwrap(self.actor), self.args.ema_decay) if self.args.enable_ema else None
        )
        self.rollout = self._rollout_form()
        self.version = 0  # optimizer steps the actor has taken
        self.token_budget = fixed_or_zero(self.args.max_tokens_per_micro_batch)
        self._announce()

    def _trained(
        self, model: nn.Module, name: str, zero: ZeroSettings, wrap: type[PackedModel]
    ) -> TrainingEngine:
        """Collective. An engine around ``model``, by the flags of ``name``: actor or critic."""
        return trained_engine(model, self.args, name, zero, wrap, self._num_steps(name))

    def _num_steps(self, name: str) -> int:
        # No schedule steps while the critic trains alone.
        warmup = self.args.critic_warmup_steps if name == "actor" else 0
        return max(1, (self.num_iters - warmup) * self.updates)

    def lay_schedules(self, updates: int, is_there: bool = False) -> None:
        """Lay the learning-rate schedules over ``updates`` optimizer steps an iteration, and move
        them to their place there, unless they have it already (``is_there``).
        """
        before, self.updates = self.updates, updates
        form, warmup = self.args.schedule, self.args.num_warmup_steps
        for name, model in self.trained.items() if updates != before else ():
            schedule, optimizer = model.lr_scheduler, model.lr_scheduler.optimizer
            new = get_scheduler(form, optimizer, warmup, self._num_steps(name))
            schedule.lr_lambdas = new.lr_lambdas
            if not is_there and schedule.last_epoch > warmup:  # it does not warm up again
                schedule.last_epoch = max(warmup, schedule.last_epoch * updates / before)
            groups = zip(optimizer.param_groups, schedule.base_lrs, new.lr_lambdas, strict=True)
            for group, rate, factor in groups:
                group["lr"] = rate * factor(schedule.last_epoch)

    def _build_actor(self) -> TrainingEngine:
        dropout = self.args.actor_dropout or 0.0
        model = self.checkpoints.language_model(self.checkpoints.actor, self._actor_zero, dropout)
        announce_rest(model)
        actor = self._trained(model, "actor", self._actor_zero, LanguageModel)
        if self.args.moe_routing_replay:
            replay_routing(actor)
        return actor

    def _build_critic(self) -> TrainingEngine | None:
        found, dropout = self.checkpoints, self.args.critic_dropout or 0.0
        if found.critic is None:
            return None
        model = found.score_model(found.critic, self._critic_zero, dropout, found.critic_tokenizer)
        return self._trained(model, "critic", self._critic_zero, ScoreModel)

    @property
    def _is_its_own_reference(self) -> bool:
        """Whether the actor with its adapters off is the reference: with LoRA on a frozen base."""
        return bool(self.args.actor_lora_dim) and self.args.only_optimize_lora

    def _frozen(
        self, name: str, twin: ZeroSettings, checkpoint: Checkpoint | None
    ) -> nn.Module | None:
        """Collective. The reference, reward model or teacher (``name``), whose trained twin has
        these settings; None without a checkpoint.
        """
        if checkpoint is None:
            return None
        zero = twin.frozen(self.args, name)
        form = self.args.row_form
        if name == "reward":
            model: PackedModel = ScoreModel(self.checkpoints.score_model(checkpoint, zero), *form)
        else:
            model = LanguageModel(self.checkpoints.language_model(checkpoint, zero), *form)
        return initialize_frozen(model, zero)

    def _announce(self) -> None:
        args = self.args
        reference = "a frozen copy" if self.ref is not None else "none"
        if self._is_its_own_reference:
            reference = "the actor without adapters"
        if args.share_base:
            reference += "; all on one base"
        critic = "no critic"
        if self.critic is not None:
            size = count_parameters(unwrap(self.critic)) / 1e6
            settings = self._critic_zero.describe() + _adapters_of(self.critic)
            critic = f"critic {size:.1f}M ({settings})"
        logger.info(
            "actor %.1fM parameters (%s%s), %s, %s, reference: %s",
            count_parameters(unwrap(self.actor)) / 1e6,
            self._actor_zero.describe(),
            _adapters_of(self.actor),
            critic,
            str(self._actor_zero.dtype).removeprefix("torch."),
            reference,
        )
        if self.teacher is not None:
            logger.info(
                "teacher %.1fM parameters: KL weight %g, discount %g",
                count_parameters(unwrap(self.teacher)) / 1e6,
                args.distill_coef,
                args.distill_gamma,
            )
        logger.info("rollout: %s", self.rollout.describe())
        for note in self.checkpoints.notes:
            logger.warning("%s", note)

    def _rollout_form(self) -> RolloutForm:
        module, settings = unwrap(self.actor), self.rollout_settings()
        config = base_of(self.actor).config
        if self.args.rollout_backend == "vllm":
            return VLLMRollout(module, config, settings)
        return rollout_form(module, config, settings, self.args.enable_hybrid_engine)

    def rollout_settings(self) -> RolloutSettings:
        """How the actor generates, by this run's flags."""
        args = self.args
        return RolloutSettings(
            dtype=self._actor_zero.dtype,
            engine=EngineConfig.of_rollout(args, self.stop_ids, num_ids(self.tokenizer)),
            tp_size=args.inference_tp_size,
            temperature=args.temperature,
            layout=args.rollout_layout,
            lora=args.rollout_lora,
            frozen_base=bool(args.actor_lora_dim) and args.only_optimize_lora,
            sharded=self._actor_zero.shards_parameters,
            layers_per_bucket=args.tp_gather_partition_size,
            release_cache=args.release_inference_cache,
            release_weights=args.unpin_actor_parameters,
        )

    @torch.no_grad()
    def score(self, batch: Experience) -> Tensor:
        """Collective. The reward model's score of every sequence, at its last token (EOS, or the
        last one of a truncated answer): (B,) fp32. ``batch`` is in host memory.
        """
        assert self.reward is not None, "no reward model"
        if self._retokenizer is not None:
            ids = self._retokenizer.batch(batch)
            prompts = None
        else:
            ids = [row[:n] for row, n in zip(batch.input_ids, batch.lengths, strict=True)]
            prompts = batch.prompt_lengths.tolist()
        rows = pack(ids, [[len(row) - 1] for row in ids], prompts)
        return self.reward(rows.to(dist.device()))

    @property
    def trained(self) -> dict[str, TrainingEngine]:
        """The actor and any critic, by name."""
        both = {"actor": self.actor, "critic": self.critic}
        return {name: model for name, model in both.items() if model is not None}

    @property
    def dtype(self) -> torch.dtype:
        """The actor's compute dtype."""
        return self._actor_zero.dtype

    @property
    def has_reference(self) -> bool:
        return self.ref is not None or self._is_its_own_reference

    @contextmanager
    def reference(self) -> Iterator[ModelOrEngine]:
        """A scope that yields the KL's reference model; call it under ``no_grad``."""
        if self.ref is not None:
            yield self.ref
            return
        assert self._is_its_own_reference, "no reference model"
        with adapters_off(unwrap(self.actor)):
            yield self.actor

    @contextmanager
    def rollout_mode(self) -> Iterator[Generator]:
        """Collective. A scope in which the actor generates; refreshed once per weight version."""
        with training_states_away(list(self.trained.values()), self.args.offloads("rollout")):
            generator = self.rollout.enter(self.version)
            try:
                yield generator
            finally:
                self.rollout.leave()

    @contextmanager
    def ema_mode(self) -> Iterator[Generator]:
        """Collective. A scope in which the moving average generates, from a copy of its own."""
        assert self.ema is not None, "no moving average; set enable_ema"
        yield self.rollout.filled_from(self._actor_stream(ema=True))

    def _actor_stream(self, ema: bool = False) -> Iterator[tuple[str, Tensor]]:
        replace = self.ema.shards() if ema and self.ema is not None else None
        return weight_stream(unwrap(self.actor), dist.device(), replace)

    def save(self, output_dir: str | Path) -> None:
        """Collective. Write actor, any critic and any actor_ema as Hugging Face folders."""
        output_dir = Path(output_dir)
        self.save_actor(output_dir / "actor")
        if self.ema is not None:
            self.save_actor(output_dir / "actor_ema", ema=True)
        if self.critic is not None:
            stream = weight_stream(unwrap(self.critic), dist.device())
            tokenizer = self.checkpoints.critic_tokenizer
            self._export(output_dir / "critic", self.critic, stream, tokenizer)

    def save_actor(self, folder: str | Path, ema: bool = False) -> None:
        """Collective. Write the actor, or its moving average, as a Hugging Face folder."""
        self._export(Path(folder), self.actor, self._actor_stream(ema), self.tokenizer, ema)

    def _export(
        self,
        folder: Path,
        model: TrainingEngine,
        stream: Iterator[tuple[str, Tensor]],
        tokenizer: PreTrainedTokenizerBase,
        is_average: bool = False,
    ) -> None:
        """Collective. Write the weights of ``model``, or their average, from ``stream``; and the
        LoRA adapter beside them where the base was frozen: it fits no other weights.
        """
        module, config = unwrap(model), base_of(model).config
        values = None if is_average else probe_values(model, config)
        export_hf(folder, stream, module, config, tokenizer, self.stop_ids, values)
        is_lora = hasattr(module, "peft_config") and self.args.only_optimize_lora
        if is_lora and not is_average:
            export_adapter(folder / "adapter", adapter_stream(module, dist.device()), module)
        write_card(folder, self.args)


def _adapters_of(model: ModelOrEngine) -> str:
    """``, LoRA 8``; empty for a model without adapters."""
    configs = getattr(unwrap(model), "peft_config", {})
    return "".join(f", LoRA {config.r}" for config in configs.values())


def base_of(model: ModelOrEngine) -> PreTrainedModel:
    """The transformers model inside an engine, wrapper or adapter."""
    return without_adapters(unwrap(model))
