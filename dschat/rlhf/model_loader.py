"""Loads the models of RLHF from their initial checkpoints, sharded under ZeRO-3."""

from torch import nn
from transformers import PreTrainedTokenizerBase

from dschat.config import RLHFConfig
from dschat.models.load import load_causal_lm, load_config, load_score_backbone
from dschat.models.vocabulary import num_ids
from dschat.rlhf.initial_checkpoints import REWARD, InitialCheckpoints
from dschat.runtime.deepspeed_engine import ZeroSettings, sharded_loading


class ModelLoader:
    """Loads models that read the ids of ``tokenizer``, the actor's."""

    def __init__(
        self,
        checkpoints: InitialCheckpoints,
        args: RLHFConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._checkpoints, self._args, self._tokenizer = checkpoints, args, tokenizer
        self._longest_row = args.max_prompt_seq_len + args.max_answer_seq_len

    def language_model(
        self, name: str, flag: str, zero: ZeroSettings, dropout: float = 0.0
    ) -> nn.Module:
        """Collective. The causal LM ``name``, which ``flag`` named."""
        with sharded_loading(zero):
            return load_causal_lm(
                name,
                flag,
                zero.dtype,
                dropout,
                self._args.attn_implementation,
                self._args.trust_remote_code,
                num_tokens=num_ids(self._tokenizer),
                longest_row=self._longest_row,
            )

    def critic(self, zero: ZeroSettings, dropout: float) -> nn.Module:
        """Collective. The critic, with a new score head if it starts from a language model."""
        checkpoints = self._checkpoints
        tokenizer = checkpoints.critic_tokenizer or self._tokenizer
        assert checkpoints.critic is not None
        with sharded_loading(zero):
            return load_score_backbone(
                checkpoints.critic,
                checkpoints.critic_flag,
                zero.dtype,
                from_base=checkpoints.critic_from_base,
                pad_token_id=tokenizer.pad_token_id,
                num_tokens=num_ids(tokenizer),
                dropout=dropout,
                attn_implementation=self._args.attn_implementation,
                trust_remote_code=self._args.trust_remote_code,
                longest_row=self._longest_row,
            )

    def reward(self, zero: ZeroSettings) -> nn.Module:
        """Collective. The reward model."""
        name, trust = self._checkpoints.reward, self._args.trust_remote_code
        assert name is not None
        pad_id = load_config(name, REWARD, trust).pad_token_id
        if pad_id is None:
            pad_id = (self._checkpoints.critic_tokenizer or self._tokenizer).pad_token_id
        with sharded_loading(zero):
            return load_score_backbone(
                name,
                REWARD,
                zero.dtype,
                from_base=False,
                pad_token_id=pad_id,
                num_tokens=0,
                dropout=0.0,
                attn_implementation=self._args.attn_implementation,
                trust_remote_code=trust,
                longest_row=self._longest_row,
            )
