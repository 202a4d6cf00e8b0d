"""The modules behind all models: `LanguageModel` predicts targets of packed rows (actor, reference,
SFT, DPO), `ScoreModel` scores their tokens (reward model, critic).

A language model returns log-probs and entropies, never logits: its head runs in chunks inside the
forward pass, where ZeRO-3 gathers its weight. A score model wraps a transformers
``...ForSequenceClassification(num_labels=1)``, whose own forward pools to one score per sequence.

Score models on the frozen weights of a language model need no copy of them: each is a module of its
own with its own adapter and score head, which trains, recomputes its activations and is exported as
others do; only the parameters of the base are the same objects. So passes of several models may
interleave in any order. No ZeRO-3: it would shard those parameters for one engine and gather them
for another.
"""

import copy
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

import dschat.distributed as dist
from dschat.losses import linear_logprobs, linear_top_ids
from dschat.models.adapter_files import ADAPTER_WEIGHTS, load_adapter
from dschat.models.checkpoint import Checkpoint
from dschat.models.checkpoint_files import ADAPTER_CONFIG
from dschat.models.linear import OneDnnLinear, product_of
from dschat.models.load import score_class
from dschat.models.packing.model import PackedModel, Packing, backbone, probe
from dschat.models.packing.rows import PackedRows, pack
from dschat.models.tokenizer import embedding_rows, grow_embeddings
from dschat.models.training_engine import full_shape

if TYPE_CHECKING:
    from peft import PeftModel

# Config fields of families that change logits after the head, or what it reads: Gemma's softcap,
# Cohere's and Granite's scales, Falcon-H1's multiplier, MiniCPM's width.
_CHANGES_LOGITS = re.compile(
    r"logit.*(soft_?cap|scal)|(lm_head|output)_mult|mup_width|dim_model_base"
)


class LanguageModel(PackedModel):
    """Log-probs of the ids that follow the columns which rows read."""

    def __init__(
        self, model: "PreTrainedModel | PeftModel", packing: Packing = "auto", parallel: int = 1
    ) -> None:
        super().__init__(model, packing, parallel)
        head = self.base.get_output_embeddings()
        self._head_is_linear = (
            type(head) in (nn.Linear, OneDnnLinear)
            and backbone(self.base) is not None
            and not _changes_logits(self.base.config)
        )
        if self._head_is_linear:
            head.forward = partial(_head_forward, head)

    def compute(
        self,
        rows: PackedRows,
        temperature: float = 1.0,
        with_entropy: bool = False,
        top_k: int = 0,
        num_ids: int = 0,
    ) -> tuple[Tensor | None, ...]:
        """Log-probs (M,) fp32 of ``rows.targets``, and entropies (M,) fp32 or None.

        ``log_softmax(logits / temperature)`` in fp32; temperature 0 (greedy) counts as 1. With
        ``rows.candidates`` the log-probs are (M, 1 + K): of the target, then of the candidates.
        ``top_k`` appends the likeliest of the first ``num_ids`` ids to the candidates; a third
        result are then the ids of the log-probs, (M, 1 + K) int64.
        """
        ids = rows.targets
        if top_k or rows.candidates is not None:
            others = [] if rows.candidates is None else [rows.candidates]
            ids = torch.cat([ids.unsqueeze(1), *others], dim=1)
        if self._head_is_linear:
            head = self.base.get_output_embeddings()
            hidden = self.hidden_states(rows)
            return head(hidden, ids, temperature, with_entropy, top_k, num_ids)
        logits = self.run(rows, "logits")  # the family changes them after the head
        if top_k:
            top = logits[:, :num_ids].topk(min(top_k, num_ids)).indices
            ids = torch.cat([ids, top], dim=1)
        results = linear_logprobs(logits, None, None, ids, temperature, with_entropy)
        return (*results, ids) if top_k else results

    def _check(self, device: torch.device) -> None:
        super()._check(device)
        if self._head_is_linear:
            rows = probe(self.base).to(device)
            head = self.base.get_output_embeddings()
            logits = self.run(rows, "logits")
            self._head_is_linear = self.gap(head(self.hidden_states(rows)), logits) is None


def _changes_logits(config: PretrainedConfig) -> bool:
    fields = config.get_text_config().to_dict().items()
    return any(_CHANGES_LOGITS.search(k) and v not in (None, 0, 1, False) for k, v in fields)


def _head_forward(
    head: nn.Linear,
    hidden: Tensor,
    target_ids: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    top_k: int = 0,
    num_ids: int = 0,
) -> Any:
    """Forward of a head that can skip the logits: without targets it is ``nn.Linear``'s.

    NOTE: it runs as the head's own forward, because ZeRO-3 gathers a weight for the forward and the
    backward pass of the module that owns it.
    """
    if target_ids is None:
        return type(head).forward(head, hidden)
    weights, product = (head.weight, head.bias), product_of(head)
    if top_k:
        top = linear_top_ids(hidden, *weights, top_k, num_ids, product)
        target_ids = torch.cat([target_ids, top], dim=1)
    results = linear_logprobs(hidden, *weights, target_ids, temperature, with_entropy, product)
    return (*results, target_ids) if top_k else results


_ROWS = 64  # of one forward of a `RewardModel`


class ScoreModel(PackedModel):
    """Scores at the columns that rows read."""

    def compute(self, rows: PackedRows) -> Tensor:
        """Scores (M,) fp32."""
        return self.base.score(self.hidden_states(rows)).squeeze(-1).float()


class RewardModel:
    """A reward model outside training, on this process's device.

    Args:
        pad_id: where its config.json has none.
        num_tokens: see `Checkpoint.score_model`.

    Raises:
        UserError: not a reward model, or its weights do not fit.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, pad_id: int, num_tokens: int = 0
    ) -> None:
        own_pad_id = checkpoint.config.pad_token_id
        pad_id = pad_id if own_pad_id is None else own_pad_id
        model = checkpoint.score_model(dtype, pad_id, num_tokens=num_tokens)
        self._model = ScoreModel(model.to(dist.device()).eval())
        self._model.check(dist.device())

    @torch.no_grad()
    def score(self, rows: list[list[int]], num_shared: Iterable[int] = ()) -> Tensor:
        """The score of each row of ids at its last token: (S,) fp32 on the CPU.

        ``num_shared``: ids at the start of each row that are computed once for adjacent rows that
        have the same ones.
        """
        shared, scores = list(num_shared), [torch.zeros(0)]
        for start in range(0, len(rows), _ROWS):
            part = slice(start, start + _ROWS)
            packed = pack(rows[part], [[len(row) - 1] for row in rows[part]], shared[part] or None)
            scores.append(self._model(packed.to(dist.device())).float().cpu())
        return torch.cat(scores)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, unsharded (ZeRO-3 keeps the full count in ``ds_numel``)."""
    return sum(full_shape(p).numel() for p in module.parameters())


FOLDER = "adapter"  # of a folder that a LoRA run exports


class SharedBase:
    """The weights of ``model``, a causal LM without adapters yet. The score models
    have its dropout too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body = backbone(model)
        assert isinstance(body, PreTrainedModel)
        self._body, self._longest_row = sharing_copy(body), getattr(model, "longest_row", 0)

    def score_model(
        self, adapter: Checkpoint | None, pad_token_id: int, num_tokens: int = 0
    ) -> nn.Module:
        """An ``AutoModelForSequenceClassification(num_labels=1)`` on these weights, with the
        adapter and the score head of the reward model ``adapter``; None: with a new score head.

        ``num_tokens``: if the embedding has fewer rows, the model gets a larger one of its own.
        """
        body = sharing_copy(self._body)
        body.config.num_labels = 1
        dtype = next(p.dtype for p in body.parameters() if p.is_floating_point())
        score_class(body.config)  # registers one where transformers has none
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(body.config, dtype=dtype)
        names = {part: name for name, part in model.named_children()}
        setattr(model, names[backbone(model)], body)
        model.config = body.config
        model.score.to_empty(device="cpu")
        model._init_weights(model.score)
        model.longest_row = self._longest_row  # as `load.from_pretrained` does, and:
        model._weight_conversions = None
        if num_tokens > embedding_rows(body.config):
            embedding = model.get_input_embeddings()  # NOTE: resizing writes into its weight
            embedding.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
            grow_embeddings(model, num_tokens)
        body.config.pad_token_id = pad_token_id
        return model if adapter is None else load_adapter(model, _adapter_folder(adapter))


def sharing_copy(module: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``module`` that has the same parameters and buffers."""
    kept: list[object] = [*module.parameters(), *module.buffers()]
    # What decodes a weight of bitsandbytes, in layers of 4 and of 8 bits.
    states = (getattr(m, name, None) for m in module.modules() for name in ("quant_state", "state"))
    kept += [state for state in states if type(state).__module__.startswith("bitsandbytes")]
    return copy.deepcopy(module, {id(one): one for one in kept})


def check_shared(
    base: Checkpoint, models: list[Checkpoint], started_from: Callable[[str, str], bool | None]
) -> None:
    """Raise ``UserError`` unless ``models`` other than ``base`` are reward models that step 2
    trained as adapters on it; and unless score models can be made on it. Loads no weights.

    ``started_from``: whether a model's training started from the weights of another; None: not
    known, and the name of the adapter's base decides.
    """
    for model in (model for model in models if model is not base):
        settings = model.json(f"{FOLDER}/{ADAPTER_CONFIG}")
        if settings is None:
            raise model.error(
                f" has no folder {FOLDER}, which --share_base loads in place of its weights; train "
                f"it with step 2 from {base.name} with --lora_dim, or leave --share_base out"
            )
        if settings.get("peft_type") != "LORA" or settings.get("use_dora"):
            raise model.error(f": its {FOLDER} is not plain LoRA; leave --share_base out")
        name = str(settings.get("base_model_name_or_path"))
        is_base = started_from(model.name, base.name)
        if is_base is None:
            is_base = os.path.realpath(name) == os.path.realpath(base.name)
        if not is_base:
            raise model.error(
                f" is an adapter of {name} as it was then, and the actor is {base.name} as it is: "
                f"--share_base needs one base; train it with step 2 from {base.name}, or name its "
                f"base as {base.flag}"
            )
        _adapter_folder(model)
    has_own_code = getattr(base.config, "auto_map", None)
    if has_own_code or len({type(backbone(base.shapes(kind))) for kind in ("lm", "score")}) > 1:
        raise base.error(
            ": language and score models of this family have different backbones, or code of their "
            "own; leave --share_base out"
        )


def _adapter_folder(checkpoint: Checkpoint) -> Path:
    files = [checkpoint.locate(f"{FOLDER}/{name}") for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    if files[1] is None:
        raise checkpoint.error(f": its {FOLDER} has no {ADAPTER_WEIGHTS}; copy it again")
    return files[1].parent
