"""The checkpoints that the models of RLHF start from: found, checked together, and loaded.

Only configurations, tokenizers and lists of weight names are read at first: mistakes show before
any weight loads.
"""

import copy
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedTokenizerBase

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.checkpoint.compatibility import started_from
from dschat.config import RLHFConfig, UserError
from dschat.hybrid.rollout_form import check_tensor_parallel
from dschat.hybrid.vllm_rollout import installed_release
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import SharedBase, check_shared
from dschat.models.packing.model import Packing
from dschat.models.tokenizer import (
    embedding_rows,
    ensure_distinct_pad,
    num_ids,
    same_ids,
    same_tokens,
    stop_ids,
)
from dschat.runtime.deepspeed_engine import ZeroSettings, sharded_loading

ACTOR = "--actor_model_name_or_path"
CRITIC = "--critic_model_name_or_path"
REWARD = "--reward_model_name_or_path"
TEACHER = "--teacher_model_name_or_path"


@dataclass
class InitialCheckpoints:
    """The checkpoints that RLHF starts from; None for a model that this run does not have.

    Attributes:
        tokenizer: the actor's.
        critic_tokenizer: saved with the critic.
        reward_tokenizer: None where the reward model reads the actor's ids; else the reward model's
            tokenizer, for which the text is re-tokenized.
        notes: warnings for the user.
        base: with ``share_base``, the weights of the actor once it is loaded.
    """

    args: RLHFConfig
    tokenizer: PreTrainedTokenizerBase
    actor: Checkpoint
    critic: Checkpoint | None = None
    reward: Checkpoint | None = None
    teacher: Checkpoint | None = None
    critic_tokenizer: PreTrainedTokenizerBase | None = None
    reward_tokenizer: PreTrainedTokenizerBase | None = None
    notes: list[str] = field(default_factory=list)
    base: SharedBase | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer of the actor."""
        return stop_ids(self.tokenizer, self.actor.generation_config)

    def language_model(
        self, checkpoint: Checkpoint, zero: ZeroSettings, dropout: float = 0.0
    ) -> nn.Module:
        """Collective. A causal LM that reads the actor's ids."""
        attention, num_tokens = self.args.attn_implementation, num_ids(self.tokenizer)
        with sharded_loading(zero):
            options = dropout, attention, num_tokens, self.args.longest_row, zero.weight_bits
            model = checkpoint.language_model(zero.dtype, *options)
        if self.args.share_base and checkpoint is self.actor:
            self.base = SharedBase(model)
        return model

    def score_model(
        self,
        checkpoint: Checkpoint,
        zero: ZeroSettings,
        dropout: float = 0.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> nn.Module:
        """Collective. The critic, with a new score head if it starts from a language model; or the
        reward model.

        ``tokenizer``: whose ids a critic reads; None: a reward model, which reads its own.
        """
        pad_id = checkpoint.config.pad_token_id if tokenizer is None else tokenizer.pad_token_id
        if pad_id is None:
            pad_id = (self.critic_tokenizer or self.tokenizer).pad_token_id
        if self.base is not None:
            adapter = None if checkpoint is self.actor else checkpoint
            tokenizer = tokenizer or self.reward_tokenizer or self.tokenizer
            return self.base.score_model(adapter, pad_id, num_ids(tokenizer))
        with sharded_loading(zero):
            return checkpoint.score_model(
                zero.dtype,
                pad_id,
                tokenizer is not None,  # may lack a score head
                dropout,
                self.args.attn_implementation,
                0 if tokenizer is None else num_ids(tokenizer),
                self.args.longest_row,
                zero.weight_bits,
            )


def find_checkpoints(
    actor: str,
    critic: str | None,
    args: RLHFConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> InitialCheckpoints:
    """Collective. Check the models that ``args`` and the two names ask for, with the actor's
    tokenizer.

    A run has a reward model if one is named, or if ``critic`` is and no reward functions score. It
    has a critic if the advantage estimator needs one. The critic values the actor's tokens one by
    one, so its checkpoint must have the actor's vocabulary. If it has another one, it is an error
    where the critic is named apart from the reward model; else the critic starts from the actor,
    with a new score head. It also does where neither is named.

    Args:
        tokenizer: the actor's; None: its checkpoint's, completed by the flags.

    Raises:
        UserError: a checkpoint (its flag named) that is missing, of the wrong kind, or unusable
            with this tokenizer.
    """
    with dist.main_process_first():  # it may write builtin/tiny
        actor, teacher = resolve_model(actor), resolve_model(args.teacher_model_name_or_path)
        critic = critic and resolve_model(critic)
        named = resolve_model(args.reward_model_name_or_path)
    trust = args.trust_remote_code
    start = Checkpoint(actor, ACTOR, trust)
    start.require_causal_lm()
    tokenizer = tokenizer or start.tokenizer(**args.tokenizer_flags)
    found = InitialCheckpoints(args, tokenizer, start)
    lora = args.actor_lora_dim, args.actor_lora_modules, "--actor_lora_dim"
    bits = args.weight_bits("actor")
    start.check("lm", args.attn_implementation, *lora, *args.row_form, bits)
    if args.rollout_backend == "vllm":
        installed_release()
        check_vllm_head(args, start, num_ids(tokenizer))
    check_tensor_parallel(start.config, args.inference_tp_size, args.rollout_backend)
    scores = bool(named) or (bool(critic) and not args.has_reward_functions)
    # `RLHFConfig` fills in the actor's name where no critic is named: that is no mistake.
    if not (scores or args.has_critic) and critic and critic != actor:
        raise UserError(
            f"{CRITIC} {critic} is not used: --advantage_estimator {args.advantage_estimator} has "
            f"no critic, and reward functions score; pass it as {REWARD} if it is to score too, "
            "else leave it out"
        )
    if scores:
        # Where one model is both, messages name the flag that most users pass.
        separate = bool(named) and args.reward_model_name_or_path != args.critic_model_name_or_path
        reward = named if separate else critic or named
        found.reward = Checkpoint(reward, REWARD if separate else CRITIC, trust)
        found.reward_tokenizer, notes = check_reward(
            found.reward,
            tokenizer,
            args.attn_implementation,
            *args.row_form,
            args.weight_bits("reward"),
        )
        found.notes += notes
    if args.has_critic:
        name = critic or (found.reward.name if found.reward else None)
        _find_critic(found, name)
    if args.teacher_model_name_or_path:
        found.teacher = Checkpoint(teacher, TEACHER, trust)
        _check_teacher(found.teacher, args, tokenizer)
    if args.share_base:
        models = [model for model in (found.reward, found.critic) if model]
        check_shared(start, models, started_from)
    return found


def check_reward(
    reward: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    attn_implementation: str | None = None,
    packing: Packing = "auto",
    parallel: int = 1,
    weight_bits: int = 0,
) -> tuple[PreTrainedTokenizerBase | None, list[str]]:
    """Check a reward model for answers in the ids of ``tokenizer``.

    Returns its own tokenizer, None where it reads ids of ``tokenizer``; and warnings for the user.

    Raises:
        UserError: missing, not a reward model, or unusable with ``tokenizer``.
    """
    reward.require_reward_model()
    reward.check("score", attn_implementation, 0, (), "", packing, parallel, weight_bits)
    own = _tokenizer_of(reward, tokenizer)
    if own is None:
        return None, [f"{reward.name} has no tokenizer: assuming that it shares the actor's"]
    if same_tokens(tokenizer, own):
        return None, []
    return own, [
        f"REWARD MODEL WITH ANOTHER TOKENIZER: {reward.name} does not tokenize as the actor does; "
        "prompts and answers are re-tokenized for it as text"
    ]


def check_vllm_head(args: RLHFConfig, actor: Checkpoint, num_tokens: int) -> None:
    """Raise ``UserError`` where vLLM's log-probs would come from a narrower head."""
    rows = embedding_rows(actor.config)
    if args.temperature not in (0, 1) and rows > num_tokens:
        raise UserError(
            f"--rollout_backend vllm with --temperature {args.temperature:g}: {actor.name} has "
            f"{rows} rows for {num_tokens} tokens, which vLLM's log-probs leave out; use "
            "--temperature 1 or --rollout_backend engine"
        )


def _find_critic(found: InitialCheckpoints, name: str | None) -> None:
    """``name`` None: neither a critic nor a reward model was named."""
    args, tokenizer, critic_tokenizer = found.args, found.tokenizer, None
    trust, critic, actor = args.trust_remote_code, found.reward, found.actor.name
    if name is None or name == actor:
        critic = None
        found.notes.append(f"CRITIC WITH A NEW SCORE HEAD: it starts from the actor ({actor})")
    else:
        if critic is None or name != critic.name:
            critic = Checkpoint(name, CRITIC, trust)
        critic_tokenizer = _tokenizer_of(critic, tokenizer)
    if critic_tokenizer is not None and not same_ids(tokenizer, critic_tokenizer):
        if critic is not found.reward:
            raise UserError(
                f"{CRITIC} {name} has another vocabulary than the actor, whose tokens it must "
                f"value one by one; leave it out (keep {REWARD}), or name a model with the "
                "actor's tokenizer"
            )
        found.notes.append(
            f"CRITIC WITH A NEW SCORE HEAD: {name} has another vocabulary than the actor, so "
            f"the critic starts from the actor ({actor}); train it first with "
            "--critic_warmup_steps"
        )
        critic = critic_tokenizer = None
    found.critic = critic = critic or found.actor
    lora = args.critic_lora_dim, args.critic_lora_modules, "--critic_lora_dim"
    bits = args.weight_bits("critic")
    critic.check("score", args.attn_implementation, *lora, *args.row_form, bits)
    # Saved with the critic; others pool at the last token that is not padding, so pad != EOS.
    found.critic_tokenizer = copy.deepcopy(critic_tokenizer or tokenizer)
    ensure_distinct_pad(found.critic_tokenizer)
    found.critic_tokenizer.chat_template = tokenizer.chat_template


def _check_teacher(
    teacher: Checkpoint, args: RLHFConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ``UserError`` unless it is a causal LM that reads the actor's ids."""
    bits = args.weight_bits("teacher")
    teacher.check("lm", args.attn_implementation, 0, (), "", *args.row_form, bits)
    own = _tokenizer_of(teacher, tokenizer)
    if own is not None and not same_ids(tokenizer, own):
        raise teacher.error(
            " has another tokenizer than the actor, whose tokens it must judge one by one; name a "
            "teacher with the same vocabulary and EOS token"
        )


def check_lengths(found: InitialCheckpoints) -> None:
    """Raise ``UserError`` where prompt and answer together exceed a model's positions.

    A reward model with another tokenizer is exempt: it counts other tokens, and texts that are too
    long for it are truncated.
    """
    reward = None if found.reward_tokenizer else found.reward
    for checkpoint in (found.actor, found.critic, reward, found.teacher):
        if checkpoint is not None:
            flags = "--max_prompt_seq_len + --max_answer_seq_len"
            checkpoint.check_positions(found.args.longest_row, flags, "lower one of them")


def _tokenizer_of(
    checkpoint: Checkpoint, actor_tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where it has none and its embedding fits the actor's."""
    try:
        return checkpoint.own_tokenizer
    except UserError:
        rows, largest = embedding_rows(checkpoint.config), num_ids(actor_tokenizer) - 1
        if rows <= largest:
            raise checkpoint.error(
                f" has no tokenizer, and its embedding has {rows} rows, but the actor's tokenizer "
                f"uses ids up to {largest}; save its tokenizer with it"
            ) from None
    return None
