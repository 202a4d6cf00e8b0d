"""Which checkpoint each of the four models starts from, found and checked before any weight loads.

Names and the actor's tokenizer come in; names, kinds and the reward model's own tokenizer go out.
Only configurations, tokenizers and lists of weight names are read. It must not know how models are
loaded or trained.
"""

import copy
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dschat.builtin_model import resolve_model
from dschat.config import RLHFConfig, UserError
from dschat.hybrid.rollout import check_tensor_parallel
from dschat.models.fit import check_fit, check_positions
from dschat.models.kind import load_config, require_causal_lm, require_score_head, reward_form
from dschat.models.load import not_a_reward_model
from dschat.models.tokenizer import ensure_distinct_pad, read_tokenizer
from dschat.models.vocabulary import embedding_rows, num_ids, same_ids, same_tokens

ACTOR = "--actor_model_name_or_path"
CRITIC = "--critic_model_name_or_path"
REWARD = "--reward_model_name_or_path"


@dataclass
class Checkpoints:
    """Where the models of RLHF come from.

    ``reward_tokenizer`` is None where the reward model reads the actor's ids as they are; else its
    own tokenizer, by which it reads the text anew. ``critic_from_base``: the critic gets a new
    score head on a language model.
    """

    actor: str
    critic: str
    reward: str
    critic_flag: str
    critic_from_base: bool
    critic_tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase | None
    reward_max_len: int | None  # positions of the reward model, where it has so few
    notes: list[str] = field(default_factory=list)  # what a user should hear of


def find_checkpoints(
    actor: str, critic: str, args: RLHFConfig, tokenizer: PreTrainedTokenizerBase
) -> Checkpoints:
    """Check the models that ``args`` and the two names ask for, together with the tokenizer.

    The critic reads the actor's tokens one by one. So where its checkpoint has another vocabulary
    it cannot start from it: named apart from the reward model's that is an error, else the critic
    starts as the actor with a new score head.

    Raises:
        UserError: naming the flag: a checkpoint that is missing, of the wrong kind, or that cannot
            be used with this tokenizer.
    """
    separate = args.reward_model_name_or_path != args.critic_model_name_or_path
    actor, critic = resolve_model(actor), resolve_model(critic)
    reward = resolve_model(args.reward_model_name_or_path) if separate else critic
    trust = args.trust_remote_code
    actor_config = load_config(actor, ACTOR, trust)
    require_causal_lm(actor_config, actor, ACTOR)
    check_tensor_parallel(actor_config, args.inference_tp_size)
    attention = args.attn_implementation
    lora = args.actor_lora_modules if args.actor_lora_dim else ()
    check_fit(actor_config, actor, ACTOR, "lm", attention, lora, "--actor_lora_modules")

    # One name for both is called by the flag that most users give it with.
    reward_flag = REWARD if separate else CRITIC
    reward_config = load_config(reward, reward_flag, trust)
    require_score_head(reward_config, reward, reward_flag)
    if reward_form(reward_config, reward, reward_flag) == "base":
        raise not_a_reward_model(reward, reward_flag, reward_config)
    check_fit(reward_config, reward, reward_flag, "score", attention)
    own = _tokenizer_of(reward, reward_config, reward_flag, tokenizer, trust)

    critic_config = load_config(critic, CRITIC, trust) if separate else reward_config
    critic_own = _tokenizer_of(critic, critic_config, CRITIC, tokenizer, trust)
    found = Checkpoints(
        actor=actor,
        critic=critic,
        reward=reward,
        critic_flag=CRITIC,
        critic_from_base=False,
        critic_tokenizer=critic_own or tokenizer,
        reward_tokenizer=None if own is None or same_tokens(tokenizer, own) else own,
        reward_max_len=getattr(reward_config.get_text_config(), "max_position_embeddings", None),
    )
    if own is None:
        found.notes.append(f"{reward} brings no tokenizer: it is taken to share the actor's")
    if found.reward_tokenizer is not None:
        found.notes.append(
            f"REWARD MODEL WITH ANOTHER TOKENIZER: {reward} does not tokenise as the actor does; "
            "it reads prompts and answers as text, by its own tokenizer"
        )
    if critic_own is not None and not same_ids(tokenizer, critic_own):
        if separate:
            raise UserError(
                f"{CRITIC} {critic} has another vocabulary than the actor, whose tokens it must "
                f"value one by one; leave it out ({REWARD} stays), or name a model with the "
                "actor's tokenizer"
            )
        found.critic, found.critic_flag, critic_config = actor, ACTOR, actor_config
        found.critic_tokenizer = tokenizer
        found.notes.append(
            f"CRITIC WITH A NEW SCORE HEAD: {reward} has another vocabulary than the actor, so "
            f"the critic starts as the actor ({actor}); --critic_warmup_steps trains it first"
        )
    require_score_head(critic_config, found.critic, found.critic_flag)
    lora = args.critic_lora_modules if args.critic_lora_dim else ()
    check_fit(
        critic_config,
        found.critic,
        found.critic_flag,
        "score",
        attention,
        lora,
        "--critic_lora_modules",
    )
    form = reward_form(critic_config, found.critic, found.critic_flag)
    found.critic_from_base = form == "base"
    # What is saved with the critic must say where a sequence ends to those who pool by padding.
    found.critic_tokenizer = copy.deepcopy(found.critic_tokenizer)
    ensure_distinct_pad(found.critic_tokenizer)
    found.critic_tokenizer.chat_template = tokenizer.chat_template
    return found


def check_lengths(found: Checkpoints, args: RLHFConfig) -> None:
    """Raise ``UserError`` where prompt and answer together are longer than a model reads.

    A reward model with another tokenizer counts other tokens, and cuts what is too long for it.
    """
    same = [] if found.reward_tokenizer else [(found.reward, REWARD)]
    for name, flag in ((found.actor, ACTOR), (found.critic, found.critic_flag), *same):
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
