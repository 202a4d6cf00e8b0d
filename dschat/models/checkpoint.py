"""A checkpoint on disk or on the hub: what it is, whether it fits the flags, and its models.

Every part is read once: configuration, headers of the weight files, tokenizer. Checks come before
any weight loads.
"""

import copy
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat.config import UserError
from dschat.models.checkpoint_files import (
    ADAPTER_CONFIG,
    CONFIG,
    CheckpointFiles,
    why_missing,
)
from dschat.models.config_files import blamed_on, read_config, read_generation_config
from dschat.models.load import (
    Kind,
    RewardForm,
    check_weights,
    from_pretrained,
    is_reward_config,
    no_score_head,
    not_causal_lm,
)
from dschat.models.lora import target_modules
from dschat.models.packing.model import Packing, cannot_pack, packing_problem
from dschat.models.packing.sequence_parallel import check_ranks
from dschat.models.quantized import check_quantizable
from dschat.models.tokenizer import (
    complete_tokenizer,
    drop_pad,
    embedding_rows,
    grow_embeddings,
    read_tokenizer,
)

# Families whose row of the pad id transformers zeroes at every load: saved without one.
_ZEROES_PAD_ROW = ("youtu",)


class Checkpoint(CheckpointFiles):
    """A checkpoint, which a flag named. See `CheckpointFiles` for its arguments and errors."""

    # -- what it is --------------------------------------------------------------------------------

    @cached_property
    def config(self) -> PretrainedConfig:
        """Its configuration; of a vision-language model its text model's. Copy it to change
        it.

        Raises:
            UserError: not a checkpoint, a LoRA adapter without its base model, quantized weights,
                or an architecture that needs the checkpoint's own code.
        """
        raw = self.json(CONFIG)
        if raw is None:
            if self.locate(ADAPTER_CONFIG) is not None:
                raise self.adapter_only()
            reason = ": its config.json is missing; name a folder that save_pretrained wrote"
            raise self.error(reason if os.path.isdir(self.name) else why_missing())
        settings = raw.get("quantization_config")
        if settings is not None:
            method = settings.get("quant_method", "?") if isinstance(settings, dict) else settings
            remedy = ", and quantize it with --load_in_4bit" * (method == "bitsandbytes")
            raise self.error(
                f" is quantized ({method}), which neither training nor generation supports; "
                f"name the checkpoint it was made from{remedy}"
            )
        try:
            return read_config(self, raw)
        except UserError as error:
            if "trust_remote_code" not in str(error.__cause__):
                raise
            raise self.error(
                " needs its own Python code, which does not run by default: read it, and pass "
                "--trust_remote_code if you trust it"
            ) from error

    @cached_property
    def generation_config(self) -> GenerationConfig | None:
        """Its generation config, which may name more EOS ids; None if it has none."""
        return read_generation_config(self)

    @cached_property
    def reward_form(self) -> RewardForm:
        """The form that a score model loads from.

        "score": ``...ForSequenceClassification``; "v_head": a reward model of DeepSpeed-Chat;
        "base": a causal LM, which needs a new score head.
        """
        if is_reward_config(self.config):
            return "score"
        return "v_head" if self.is_legacy_reward else "base"

    def require_causal_lm(self) -> None:
        """Raise ``UserError`` unless this is a causal language model."""
        is_reward, other = is_reward_config(self.config), not_causal_lm(self.config)
        if other and not is_reward:
            raise self.error(f" is a {other}; name a causal LM")
        if is_reward or (os.path.isdir(self.name) and self.is_legacy_reward):
            raise self.error(
                " is a reward model, which scores and does not generate text; name a causal LM, "
                "such as step 1's folder or the actor of step 3"
            )

    def require_reward_model(self) -> None:
        """Raise ``UserError`` unless this is a reward model."""
        if self.reward_form == "base":
            raise self.error(
                f" is not a reward model (its config.json says {self.config.architectures}); train "
                "one with step 2 first"
            )

    # -- its tokenizer -----------------------------------------------------------------------------

    @cached_property
    def own_tokenizer(self) -> PreTrainedTokenizerBase:
        """See `read_tokenizer`."""
        return read_tokenizer(self)

    def tokenizer(self, **flags: Any) -> PreTrainedTokenizerBase:
        """Its tokenizer, completed by ``flags``; see `complete_tokenizer`."""
        return complete_tokenizer(self, copy.deepcopy(self.own_tokenizer), **flags)

    # -- checks ------------------------------------------------------------------------------------

    def check(
        self,
        kind: Kind,
        attn_implementation: str | None = None,
        lora_dim: int = 0,
        lora_modules: Sequence[str] = (),
        lora_flag: str = "--lora_dim",
        packing: Packing = "auto",
        parallel: int = 1,
        weight_bits: int = 0,
    ) -> None:
        """Raise ``UserError`` unless this loads as a model of ``kind``.

        NOTE: call it outside ZeRO-3's loading context, in which modules cannot be built on the meta
        device.

        Args:
            lora_dim: rank of the adapters on ``lora_modules``; 0: no adapters.
            parallel: ``--sequence_parallel_size``.

        Raises:
            UserError: another kind; missing, unexpected, reshaped or integer weights; an attention
                implementation, packing or LoRA modules that the architecture lacks.
        """
        if kind == "lm":
            self.require_causal_lm()
        if integers := self.integer_weights:
            raise self.error(
                f" stores {len(integers)} weights as integers, such as {integers[0]}; name the "
                "floating-point checkpoint that it was made from"
            )
        self.check_checksums()
        if kind == "lm":
            _ = self.generation_config
        check_ranks(self.config, parallel, self.name)
        if getattr(self.config, "auto_map", None):
            return  # only its own code can build it, which loading runs
        with blamed_on(self):
            model = self.shapes(kind)
        if attn_implementation:
            model = self._with_attention(kind, attn_implementation)
        if (packing == "on" or parallel > 1) and (problem := packing_problem(model)):
            raise cannot_pack(model, problem, parallel)
        if lora_dim:
            target_modules(model, lora_modules, lora_flag.replace("_dim", "_modules"))
        if weight_bits:
            check_quantizable(model, weight_bits)

    def check_positions(self, length: int, flags: str, remedy: str) -> None:
        """Raise ``UserError`` if ``length`` tokens exceed its positions, or Doge's window."""
        text = self.config.get_text_config()
        limits = ("max_position_embeddings", "keep_window_size")
        positions = min(
            filter(None, (getattr(text, limit, None) for limit in limits)), default=None
        )
        if positions is not None and length > positions:
            raise UserError(f"{flags} {length}: {self.name} has {positions} positions; {remedy}")

    def _with_attention(self, kind: Kind, attn_implementation: str) -> PreTrainedModel:
        try:
            return self.shapes(kind, attn_implementation)
        except (ValueError, ImportError) as error:
            if isinstance(error, UserError):
                raise
            reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
            raise UserError(
                f"--attn_implementation {attn_implementation}: {self.name} cannot use it here "
                f"({reason}); sdpa and eager always work"
            ) from error

    # -- its models --------------------------------------------------------------------------------

    def language_model(
        self,
        dtype: torch.dtype,
        dropout: float | None = None,
        attn_implementation: str | None = None,
        num_tokens: int = 0,
        longest_row: int = 0,
        weight_bits: int = 0,
    ) -> PreTrainedModel:
        """An ``AutoModelForCausalLM`` with exactly these weights, on the CPU or sharded.

        Args:
            dropout: probability of every dropout; None: the model's own.
            num_tokens: size of the tokenizer; embedding and head grow to it where they are
                smaller.
            longest_row: tokens of the longest row that the run's flags allow; 0: not known.
            weight_bits: quantize its linear layers to 4 or 8 bits, on the device; 0: do not.

        Raises:
            UserError: not a causal LM, or unreadable, missing, unexpected, reshaped or non-finite
                weights.
        """
        self.require_causal_lm()
        config = copy.deepcopy(self.config)
        pad_token_id = drop_pad(config)
        if getattr(config.get_text_config(), "tie_word_embeddings", False) and self.has_own_head:
            # NOTE: under ZeRO-3 transformers cannot compare the two, and would tie them.
            config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
        options = dtype, dropout, attn_implementation, longest_row, weight_bits
        model = self._loaded("lm", config, *options)
        grow_embeddings(model, num_tokens)
        known = pad_token_id is not None and 0 <= pad_token_id < embedding_rows(model.config)
        if known and config.model_type not in _ZEROES_PAD_ROW:
            model.config.pad_token_id = pad_token_id
        return model

    def score_model(
        self,
        dtype: torch.dtype,
        pad_token_id: int,
        from_base: bool = False,
        dropout: float | None = None,
        attn_implementation: str | None = None,
        num_tokens: int = 0,
        longest_row: int = 0,
        weight_bits: int = 0,
    ) -> PreTrainedModel:
        """An ``AutoModelForSequenceClassification(num_labels=1)``; see `language_model`.

        Args:
            pad_token_id: for its config.json, by which others find a text's last token.
            from_base: it may start from a causal LM; then the score head may be missing and the LM
                head is unused.

        Raises:
            UserError: as `language_model`, or not a reward model.
        """
        if not from_base:
            self.require_reward_model()
        options = dtype, dropout, attn_implementation, longest_row, weight_bits
        model = self._loaded("score", copy.deepcopy(self.config), *options)
        grow_embeddings(model, num_tokens)
        model.config.pad_token_id = pad_token_id
        return model

    def shapes(self, kind: Kind, attn_implementation: str | None = None) -> PreTrainedModel:
        """The model on the meta device, without memory, from the headers of the weight files.
        NOTE: call it outside ZeRO-3's loading context.

        Raises:
            UserError: no per-token score head; missing, unexpected or reshaped weights.
        """
        options = torch.float32, None, attn_implementation, 0, 0, "meta"
        return self._loaded(kind, copy.deepcopy(self.config), *options)

    def _loaded(self, kind: Kind, config: PretrainedConfig, *options: Any) -> PreTrainedModel:
        """The model with exactly these weights; ``options`` of `from_pretrained`."""
        if kind == "score":
            config.num_labels = 1
        drop_pad(config)
        model, info = from_pretrained(kind, self, config, *options)
        if kind == "score" and (config.is_encoder_decoder or not hasattr(model, "score")):
            raise no_score_head(self, type(model).__name__)
        check_weights(model, info, self, kind == "score" and self.reward_form == "base")
        if kind == "lm":
            model.rest = info["rest"]
        return model
