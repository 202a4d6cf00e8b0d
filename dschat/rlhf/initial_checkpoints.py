"""Decides which checkpoint each model starts from, and checks all of them.

Only configurations, tokenizers and lists of weight names are read: mistakes show before any weight
loads.
"""

import copy
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat.builtin.tiny_model import resolve_model
from dschat.config import RLHFConfig, UserError
from dschat.hybrid.rollout_form import check_tensor_parallel
from dschat.models.fit import check_fit, check_positions
from dschat.models.load import not_a_reward_model
from dschat.models.model_kind import load_config, reward_form
from dschat.models.packing.model import Packing
from dschat.models.tokenizer import ensure_distinct_pad, read_tokenizer
from dschat.models.vocabulary import embedding_rows, num_ids, same_ids, same_tokens

ACTOR = "--actor_model_name_or_path"
CRITIC = "--critic_model_name_or_path"
REWARD = "--reward_model_name_or_path"
TEACHER = "--teacher_model_name_or_path"


@dataclass
class InitialCheckpoints:
    """The checkpoints that RLHF starts from; None for a model that this run does not have.

    ``reward_tokenizer`` is None where the reward model reads the actor's ids; else it is the reward
    model's tokenizer, and the text is re-tokenized. ``critic_from_base``: the critic is a language
    model with a new score head.
    """

    actor: str
    critic: str | None = None
    reward: str | None = None
    teacher: str | None = None
    critic_flag: str = CRITIC
    critic_from_base: bool = False
    critic_tokenizer: PreTrainedTokenizerBase | None = None
    reward_tokenizer: PreTrainedTokenizerBase | None = None
    reward_max_len: int | None = None  # positions of the reward model; None: not bounded
    notes: list[str] = field(default_factory=list)  # warnings for the user


def find_checkpoints(
    actor: str, critic: str | None, args: RLHFConfig, tokenizer: PreTrainedTokenizerBase
) -> InitialCheckpoints:
    """Check the models that ``args`` and the two names ask for, together with the tokenizer.

    A run has a reward model if one is named, or if ``critic`` is and no reward functions score. It
    has a critic if the advantage estimator needs one. The critic values the actor's tokens one by
    one, so its checkpoint must have the actor's vocabulary. If it has another one, it is an error
    where the critic is named apart from the reward model; else the critic starts from the actor,
    with a new score head. It also does where neither is named.

    Raises:
        UserError: a checkpoint (its flag named) that is missing, of the wrong kind, or unusable
            with this tokenizer.
    """
    trust = args.trust_remote_code
    named = args.reward_model_name_or_path
    separate = bool(named) and named != args.critic_model_name_or_path
    scores = bool(named) or (bool(critic) and not args.has_reward_functions)
    checkpoints = InitialCheckpoints(resolve_model(actor))
    actor_config = load_config(checkpoints.actor, ACTOR, trust)
    lora = args.actor_lora_dim, args.actor_lora_modules, "--actor_lora_dim"
    attention = args.attn_implementation
    check_fit(actor_config, checkpoints.actor, ACTOR, "lm", attention, *lora, args.packing)
    check_tensor_parallel(actor_config, args.inference_tp_size)
    # `RLHFConfig` fills in the actor's name where no critic is named: that is no mistake.
    if not (scores or args.has_critic) and critic and resolve_model(critic) != checkpoints.actor:
        raise UserError(
            f"{CRITIC} {critic} is not used: --advantage_estimator {args.advantage_estimator} has "
            f"no critic, and reward functions score; pass it as {REWARD} if it is to score too, "
            "else leave it out"
        )
    if scores:
        # Where one model is both, messages name the flag that most users pass.
        flag = REWARD if separate else CRITIC
        reward = named if separate else critic or named
        assert reward is not None
        options = trust, attention, args.packing
        find_reward(checkpoints, resolve_model(reward), flag, tokenizer, *options)
    if args.has_critic:
        name = resolve_model(critic) if critic else checkpoints.reward
        _find_critic(checkpoints, name, name == checkpoints.reward, args, tokenizer)
    if args.has_teacher:
        name = resolve_model(args.teacher_model_name_or_path)
        checkpoints.teacher = _checked_teacher(name, args, tokenizer)
    return checkpoints


def find_reward(
    checkpoints: InitialCheckpoints,
    name: str,
    flag: str,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    packing: Packing = "auto",
) -> None:
    """Check the reward model ``name`` and add it to ``checkpoints``.

    Raises:
        UserError: naming ``flag``: missing, not a reward model, or unusable with ``tokenizer``.
    """
    config = load_config(name, flag, trust_remote_code)
    if reward_form(config, name, flag) == "base":
        raise not_a_reward_model(name, flag, config)
    check_fit(config, name, flag, "score", attn_implementation, packing=packing)
    reward_tokenizer = _tokenizer_of(name, config, flag, tokenizer, trust_remote_code)
    checkpoints.reward = name
    if reward_tokenizer is not None and not same_tokens(tokenizer, reward_tokenizer):
        checkpoints.reward_tokenizer = reward_tokenizer
    checkpoints.reward_max_len = getattr(config.get_text_config(), "max_position_embeddings", None)
    if reward_tokenizer is None:
        checkpoints.notes.append(f"{name} has no tokenizer: assuming that it shares the actor's")
    if checkpoints.reward_tokenizer is not None:
        checkpoints.notes.append(
            f"REWARD MODEL WITH ANOTHER TOKENIZER: {name} does not tokenize as the actor does; "
            "prompts and answers are re-tokenized for it as text"
        )


def _find_critic(
    checkpoints: InitialCheckpoints,
    name: str | None,
    is_reward: bool,
    args: RLHFConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """``name`` None: neither a critic nor a reward model was named."""
    trust, flag, critic_tokenizer = args.trust_remote_code, CRITIC, None
    if name is None or name == checkpoints.actor:
        name, flag = checkpoints.actor, ACTOR
        checkpoints.notes.append(f"CRITIC WITH A NEW SCORE HEAD: it starts from the actor ({name})")
    else:
        config = load_config(name, CRITIC, trust)
        critic_tokenizer = _tokenizer_of(name, config, CRITIC, tokenizer, trust)
    if critic_tokenizer is not None and not same_ids(tokenizer, critic_tokenizer):
        if not is_reward:
            raise UserError(
                f"{CRITIC} {name} has another vocabulary than the actor, whose tokens it must "
                f"value one by one; leave it out (keep {REWARD}), or name a model with the "
                "actor's tokenizer"
            )
        checkpoints.notes.append(
            f"CRITIC WITH A NEW SCORE HEAD: {name} has another vocabulary than the actor, so "
            f"the critic starts from the actor ({checkpoints.actor}); train it first with "
            "--critic_warmup_steps"
        )
        name, flag, critic_tokenizer = checkpoints.actor, ACTOR, None
    config = load_config(name, flag, trust)
    lora = args.critic_lora_dim, args.critic_lora_modules, "--critic_lora_dim"
    check_fit(config, name, flag, "score", args.attn_implementation, *lora, args.packing)
    checkpoints.critic, checkpoints.critic_flag = name, flag
    checkpoints.critic_from_base = reward_form(config, name, flag) == "base"
    # Saved with the critic; others pool at the last token that is not padding, so pad != EOS.
    checkpoints.critic_tokenizer = copy.deepcopy(critic_tokenizer or tokenizer)
    ensure_distinct_pad(checkpoints.critic_tokenizer)
    checkpoints.critic_tokenizer.chat_template = tokenizer.chat_template


def _checked_teacher(name: str, args: RLHFConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """``name``, a causal LM that reads the actor's ids."""
    trust = args.trust_remote_code
    config = load_config(name, TEACHER, trust)
    check_fit(config, name, TEACHER, "lm", args.attn_implementation, packing=args.packing)
    teacher_tokenizer = _tokenizer_of(name, config, TEACHER, tokenizer, trust)
    if teacher_tokenizer is not None and not same_ids(tokenizer, teacher_tokenizer):
        raise UserError(
            f"{TEACHER} {name} has another tokenizer than the actor, whose tokens it must judge "
            "one by one; name a teacher with the same vocabulary and EOS token"
        )
    return name


def check_lengths(checkpoints: InitialCheckpoints, args: RLHFConfig) -> None:
    """Raise ``UserError`` where prompt and answer together exceed a model's positions.

    A reward model with another tokenizer is exempt: it counts other tokens, and texts that are too
    long for it are truncated.
    """
    reward = None if checkpoints.reward_tokenizer else checkpoints.reward
    for name, flag in (
        (checkpoints.actor, ACTOR),
        (checkpoints.critic, checkpoints.critic_flag),
        (reward, REWARD),
        (checkpoints.teacher, TEACHER),
    ):
        if name is None:
            continue
        check_positions(
            load_config(name, flag, args.trust_remote_code),
            args.max_prompt_seq_len + args.max_answer_seq_len,
            name,
            "--max_prompt_seq_len + --max_answer_seq_len",
            "lower one of them",
        )


def _tokenizer_of(
    name: str,
    config: PretrainedConfig,
    flag: str,
    actor_tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None where it has none and its embedding fits the actor's."""
    try:
        return read_tokenizer(name, flag, trust_remote_code)
    except UserError:
        if embedding_rows(config) < num_ids(actor_tokenizer):
            raise UserError(
                f"{flag} {name} has no tokenizer, and its embedding has {embedding_rows(config)} "
                f"rows, but the actor's tokenizer uses ids up to {num_ids(actor_tokenizer) - 1}; "
                "save its tokenizer with it"
            ) from None
    return None
