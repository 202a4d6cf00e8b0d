"""Which checkpoint each of the four models starts from, found and checked before any weight loads.

Names and the actor's tokenizer come in; names, kinds and the reward model's own tokenizer go out.
Only configurations, tokenizers and lists of weight names are read. It must not know how models are
loaded or trained.
"""

import copy
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat.builtin.tiny_model import resolve_model
from dschat.config import RLHFConfig, UserError
from dschat.hybrid.rollout_form import check_tensor_parallel
from dschat.models.fit import check_fit, check_positions
from dschat.models.load import not_a_reward_model
from dschat.models.model_kind import load_config, require_causal_lm, require_score_head, reward_form
from dschat.models.tokenizer import ensure_distinct_pad, read_tokenizer
from dschat.models.vocabulary import embedding_rows, num_ids, same_ids, same_tokens

ACTOR = "--actor_model_name_or_path"
CRITIC = "--critic_model_name_or_path"
REWARD = "--reward_model_name_or_path"


@dataclass
class InitialCheckpoints:
    """Where the models of RLHF come from; None for a model that there is not.

    ``reward_tokenizer`` is None where the reward model reads the actor's ids as they are; else its
    own tokenizer, by which it reads the text anew. ``critic_from_base``: the critic gets a new
    score head on a language model.
    """

    actor: str
    critic: str | None = None
    reward: str | None = None
    critic_flag: str = CRITIC
    critic_from_base: bool = False
    critic_tokenizer: PreTrainedTokenizerBase | None = None
    reward_tokenizer: PreTrainedTokenizerBase | None = None
    reward_max_len: int | None = None  # positions of the reward model, where it has so few
    notes: list[str] = field(default_factory=list)  # what a user should hear of


def find_checkpoints(
    actor: str, critic: str | None, args: RLHFConfig, tokenizer: PreTrainedTokenizerBase
) -> InitialCheckpoints:
    """Check the models that ``args`` and the two names ask for, together with the tokenizer.

    There is a reward model unless programs score and none is named; there is a critic where the
    advantage estimator has one. The critic reads the actor's tokens one by one. So where its
    checkpoint has another vocabulary it cannot start from it: named apart from the reward model's
    that is an error, else the critic starts as the actor with a new score head; and so it does
    where neither is named.

    Raises:
        UserError: naming the flag: a checkpoint that is missing, of the wrong kind, or that cannot
            be used with this tokenizer.
    """
    trust = args.trust_remote_code
    named = args.reward_model_name_or_path
    separate = bool(named) and named != args.critic_model_name_or_path
    scores = bool(named) or (bool(critic) and not args.has_reward_programs)
    found = InitialCheckpoints(resolve_model(actor))
    actor_config = load_config(found.actor, ACTOR, trust)
    require_causal_lm(actor_config, found.actor, ACTOR)
    check_tensor_parallel(actor_config, args.inference_tp_size)
    lora = args.actor_lora_dim, args.actor_lora_modules, "--actor_lora_dim"
    attention = args.attn_implementation
    check_fit(actor_config, found.actor, ACTOR, "lm", attention, *lora)
    # The actor's own name is what `RLHFConfig` fills in.
    if not (scores or args.has_critic) and critic and resolve_model(critic) != found.actor:
        raise UserError(
            f"{CRITIC} {critic} has no use: --advantage_estimator {args.advantage_estimator} has "
            f"no critic, and programs score; if it is to score too, name it {REWARD}, else leave "
            "it out"
        )
    if scores:
        # One name for both is called by the flag that most users give it with.
        flag = REWARD if separate else CRITIC
        _find_reward(found, resolve_model(named if separate else critic), flag, args, tokenizer)
    if args.has_critic:
        name = resolve_model(critic) if critic else found.reward
        _find_critic(found, name, name == found.reward, args, tokenizer)
    return found


def _find_reward(
    found: InitialCheckpoints,
    name: str,
    flag: str,
    args: RLHFConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    trust = args.trust_remote_code
    config = load_config(name, flag, trust)
    require_score_head(config, name, flag)
    if reward_form(config, name, flag) == "base":
        raise not_a_reward_model(name, flag, config)
    check_fit(config, name, flag, "score", args.attn_implementation)
    own = _tokenizer_of(name, config, flag, tokenizer, trust)
    found.reward = name
    found.reward_tokenizer = None if own is None or same_tokens(tokenizer, own) else own
    found.reward_max_len = getattr(config.get_text_config(), "max_position_embeddings", None)
    if own is None:
        found.notes.append(f"{name} brings no tokenizer: it is taken to share the actor's")
    if found.reward_tokenizer is not None:
        found.notes.append(
            f"REWARD MODEL WITH ANOTHER TOKENIZER: {name} does not tokenise as the actor does; "
            "it reads prompts and answers as text, by its own tokenizer"
        )


def _find_critic(
    found: InitialCheckpoints,
    name: str | None,
    is_reward: bool,
    args: RLHFConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """``name`` None: neither it nor a reward model was named."""
    trust, flag, own = args.trust_remote_code, CRITIC, None
    if name is None or name == found.actor:
        name, flag = found.actor, ACTOR
        found.notes.append(f"CRITIC WITH A NEW SCORE HEAD: it starts as the actor ({name})")
    else:
        config = load_config(name, CRITIC, trust)
        own = _tokenizer_of(name, config, CRITIC, tokenizer, trust)
    if own is not None and not same_ids(tokenizer, own):
        if not is_reward:
            raise UserError(
                f"{CRITIC} {name} has another vocabulary than the actor, whose tokens it must "
                f"value one by one; leave it out ({REWARD} stays), or name a model with the "
                "actor's tokenizer"
            )
        found.notes.append(
            f"CRITIC WITH A NEW SCORE HEAD: {name} has another vocabulary than the actor, so "
            f"the critic starts as the actor ({found.actor}); --critic_warmup_steps trains it first"
        )
        name, flag, own = found.actor, ACTOR, None
    config = load_config(name, flag, trust)
    require_score_head(config, name, flag)
    lora = args.critic_lora_dim, args.critic_lora_modules, "--critic_lora_dim"
    check_fit(config, name, flag, "score", args.attn_implementation, *lora)
    found.critic, found.critic_flag = name, flag
    found.critic_from_base = reward_form(config, name, flag) == "base"
    # What is saved with the critic must say where a sequence ends to those who pool by padding.
    found.critic_tokenizer = copy.deepcopy(own or tokenizer)
    ensure_distinct_pad(found.critic_tokenizer)
    found.critic_tokenizer.chat_template = tokenizer.chat_template


def check_lengths(found: InitialCheckpoints, args: RLHFConfig) -> None:
    """Raise ``UserError`` where prompt and answer together are longer than a model reads.

    A reward model with another tokenizer counts other tokens, and cuts what is too long for it.
    """
    reward = None if found.reward_tokenizer else found.reward
    for name, flag in (
        (found.actor, ACTOR),
        (found.critic, found.critic_flag),
        (reward, REWARD),
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
    actors: PreTrainedTokenizerBase,
    trust_remote_code: bool,
) -> PreTrainedTokenizerBase | None:
    """The checkpoint's own tokenizer; None where it brings none and its rows fit the actor's."""
    try:
        return read_tokenizer(name, flag, trust_remote_code)
    except UserError:
        if embedding_rows(config) < num_ids(actors):
            raise UserError(
                f"{flag} {name} has no tokenizer of its own and knows {embedding_rows(config)} "
                f"token ids, but the actor's tokenizer uses ids up to {num_ids(actors) - 1}; save "
                "its tokenizer with it"
            ) from None
    return None
