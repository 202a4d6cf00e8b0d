"""Runs the transformer decoder: packed token ids to hidden states and logits.

One implementation serves all families; a `ModelSpec` holds their differences. Tensor-parallel ranks
all-reduce after attention and after the MLP, and all-gather the logits. The caller passes attention
as a function, so the decoder is independent of the cache.

Shapes: T packed tokens, E hidden size, H and K this rank's query and key-value heads, D head size.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from dschat.inference.kernels import cpu
from dschat.inference.kernels.cuda import ACTIVATIONS
from dschat.inference.model.attention import Attend, Attention, KeepExperts, own_heads
from dschat.inference.model.experts import Experts
from dschat.inference.model.layers import Latent, Layer, Mlp, Norm, Norms, split_gates
from dschat.inference.model.module_parts import Constants
from dschat.inference.model.positions import Rotary, alibi_slopes, query_scales
from dschat.inference.model.spec import GATES, ModelSpec
from dschat.inference.model.states import Carried, StateTrial, StepCache
from dschat.inference.model.step_kernels import StepKernels, read_by
from dschat.inference.model.weights import AnyLinear, Weights
from dschat.models.packing.states import StatefulRows, reading

# torch's fused versions of activations that transformers composes of small operations.
_FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh_gelu": partial(F.gelu, approximate="tanh"),
}

# The CPU kernels run on one thread and read their operands once; torch's operations run on all
# threads and read them two to four times. Measured on two AVX-512 cores: equal at about a million
# elements (rows x MLP width), and the kernels are faster below.
_BREAK_EVEN_TIMES_THREADS = 1 << 21


class Decoder(StateTrial):
    """``num_positions``: the longest sequence, for the rotary tables."""

    def __init__(
        self, spec: ModelSpec, config: PretrainedConfig, weights: Weights, num_positions: int
    ) -> None:
        self.spec, self.weights, self.config = spec, weights, config
        self._group = weights.group
        fused = _FUSED.get(ACTIVATIONS.get(spec.activation, ""))
        self._activation = fused or ACT2FN[spec.activation]
        device, dtype = weights.device, weights.dtype
        self._rotaries = {
            rope: Rotary(spec, config, rope, num_positions, dtype, device)
            for rope in dict.fromkeys(spec.rope(i) for i in range(spec.num_layers))
            if rope is not None
        }
        scales = query_scales(spec, num_positions)
        self._query_scales = None if scales is None else scales.to(device=device, dtype=dtype)
        # As transformers rounds it.
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype).item()
        self.slopes = None
        if spec.alibi:
            slopes = alibi_slopes(spec.num_heads).view(self._group.size, weights.num_heads)
            self.slopes = slopes[self._group.rank].to(device)
        self._norm = Norms(spec.norm_eps)
        self._constants = Constants()
        self._layers: list[Layer] = []
        self._kernels: cpu.Kernels | None = None
        self._version = -1  # of the weights in `_layers`

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        ready: Tensor | None = None,
        kernels: StepKernels | None = None,
        carried: Carried | StatefulRows | None = None,
    ) -> Tensor:
        """Logits (R, V) of the rows ``ready`` of packed ids and positions (T,) int64; None: all.
        Collective in the tensor-parallel group.

        ``kernels``: of a captured step; those for the attention run it. ``carried``: the states of
        the rows, where layers have any.
        """
        attend: Attend = attention
        if kernels is not None and kernels.runs("attention"):
            self._look_up()
            attending = [w for w in self._layers if w.out is not None]
            known = () if self.spec.heads_apart else (attending, self._query_scales)
            attend = kernels.attention(attention, *known)
        step = self.begin(positions, attend, kernels)
        step = step._replace(keep_experts=attention.keep_experts, carried=carried)
        with ExitStack() as scope:
            if isinstance(carried, StatefulRows):
                scope.enter_context(reading(carried))
            if carried is not None and tokens.is_cuda:
                scope.enter_context(self._constants)
            hidden = self._hidden(tokens, step)
        return self.logits(hidden if ready is None else hidden.index_select(0, ready), kernels)

    @torch.inference_mode()
    def _hidden(self, tokens: Tensor, step: "_Step") -> Tensor:
        """What the head reads, (T, embedding size). Collective in the tensor-parallel group."""
        h, added = self.embed(tokens, step.positions, step.cuda), None
        for i in range(self.spec.num_layers):
            h, added = self.layer(i, h, added, step)
        return self.finish(h, added, step)

    def _probed(self, rows: list[range], cache: StepCache) -> Tensor:
        places = torch.tensor([token for row in rows for token in row], device=self.weights.device)
        step = self.begin(places, own_heads, None)._replace(carried=Carried(cache, 1, 0))
        return self.logits(self._hidden(places, step))

    def finish(self, h: Tensor, added: Tensor | None, step: "_Step") -> Tensor:
        """What the head reads, after the last layer."""
        if self._final_norm is not None:
            h = self._add_norm(self._final_norm, h, added, step, self.weights.linears["head"])
        elif added is not None:
            h = h.add_(added)
        if "project_out" in self.weights.linears:
            h = self.weights.linears["project_out"](h)
        return h

    @torch.inference_mode()
    def logits(self, hidden: Tensor, kernels: StepKernels | None = None) -> Tensor:
        """(R, embedding size) -> (R, V), whole on every rank. Collective in the group."""
        head, spec = self.weights.linears["head"], self.spec
        logits = head(hidden) if kernels is None else kernels.linear(head, hidden)
        if self._group.size > 1:
            logits = self._group.all_gather(logits).transpose(0, 1).flatten(1)  # R may be 0
            logits = logits[:, : spec.vocab_size]
        if spec.logits_scale != 1.0:
            logits.mul_(spec.logits_scale)
        if spec.logits_softcap is not None:
            logits.div_(spec.logits_softcap).tanh_().mul_(spec.logits_softcap)
        return logits

    def embed(self, tokens: Tensor, positions: Tensor, kernels: StepKernels | None) -> Tensor:
        """The first layer's input (T, E)."""
        weights, spec = self.weights, self.spec
        table = weights.tensors["embed.weight"]
        is_plain = self._group.size == 1 and "project_in" not in weights.linears
        is_plain = is_plain and (self._embed_scale == 1.0 or not spec.num_positions)
        if kernels is not None and is_plain and kernels.runs("state"):
            of_positions = weights.tensors["positions.weight"] if spec.num_positions else None
            h = kernels.embed(tokens, table, positions, of_positions, spec.position_offset)
            h = h if self._embed_scale == 1.0 else h.mul_(self._embed_scale)
            return h if self._embed_norm is None else self._norm(self._embed_norm, h)
        if self._group.size == 1:
            h = F.embedding(tokens, table)
        else:  # each rank has some rows; those of other ranks are zero here, then summed
            local = tokens - self._group.rank * weights.vocab_size
            absent = (local < 0) | (local >= weights.vocab_size)
            h = F.embedding(local.masked_fill(absent, 0), table)
            h = self._group.all_reduce_sum(h.masked_fill_(absent.unsqueeze(1), 0.0))
        if "project_in" in weights.linears:
            h = weights.linears["project_in"](h)
        if self._embed_scale != 1.0:
            h = h.mul_(self._embed_scale)
        if spec.num_positions:
            table = weights.tensors["positions.weight"]
            h = h + F.embedding(positions + spec.position_offset, table)
        return h if self._embed_norm is None else self._norm(self._embed_norm, h)

    def begin(self, positions: Tensor, attend: Attend, cuda: StepKernels | None) -> "_Step":
        """What the layers of a step share. If kernels of ``cuda`` run the attention, ``attend`` is
        theirs: it gets heads before their norms and rotation.
        """
        self._look_up()
        apart = self.spec.heads_apart
        if cuda is not None and cuda.runs("attention") and not apart:
            return _Step(attend, positions, cuda=cuda, attend_rotates=True)
        kernels = self._kernels if cuda is None else None
        widest = self.weights.intermediate_size * (2 if self.spec.gated else 1)
        threads = torch.get_num_threads()
        if threads > 1 and positions.shape[0] * widest * threads > _BREAK_EVEN_TIMES_THREADS:
            kernels = None
        rotates = kernels is None or self.spec.interleaved_rotary or apart
        rows = {r: r.rows(positions) for r in self._rotaries.values()} if rotates else {}
        scales = self._query_scales
        scales = None if scales is None else scales[positions].view(-1, 1, 1)
        return _Step(attend, positions, kernels, rows, scales, cuda)

    def _look_up(self) -> None:
        """Collect each layer's weights, so that a step does not look them up by name."""
        weights, spec = self.weights, self.spec
        if self._version == weights.version:
            return
        self._embed_norm, self._final_norm = (
            Norm.of(weights, name) for name in ("embed_norm", "final_norm")
        )
        ropes = [spec.rope(i) for i in range(spec.num_layers)]
        self._layers = [
            Layer.of(weights, i, None if rope is None else self._rotaries[rope])
            for i, rope in enumerate(ropes)
        ]
        self._version = weights.version
        if weights.device.type == "cpu" and weights.dtype == torch.float32:
            self._kernels = cpu.load() if all(w.is_in_order for w in self._layers) else None

    def layer(
        self, i: int, h: Tensor, added: Tensor | None, step: "_Step"
    ) -> tuple[Tensor, Tensor | None]:
        """Takes and returns the residual stream ``h`` and the term still to be added to it."""
        spec, w = self.spec, self._layers[i]
        x = self._add_norm(w.norm1, h, added, step, w.qkv) if spec.pre_norm else h
        mixed = self._mixed(w, x, step)

        def add_up(partial_sum: Tensor, norm: Norm | None = None) -> Tensor:
            total = self._group.all_reduce_sum(partial_sum)
            total = total if norm is None else self._add_norm(norm, total, None, step)
            return total if spec.residual_scale == 1.0 else total.mul_(spec.residual_scale)

        if spec.parallel_residual:
            x = x if w.norm2 is None else self._add_norm(w.norm2, h, None, step)
            mixed.add_(self._mlp(w, x, step))
            return h, add_up(mixed)
        if not spec.pre_norm:
            h = self._add_norm(w.norm1, h, add_up(mixed), step, w.up)
            return self._add_norm(w.norm2, h, add_up(self._mlp(w, h, step)), step), None
        h = x if spec.residual_after_norm else h
        x = self._add_norm(w.norm2, h, add_up(mixed, w.out_norm), step, w.up)
        mixed = add_up(self._mlp(w, x, step), w.down_norm)
        return (x if spec.residual_after_norm else h), mixed

    def _mixed(self, w: Layer, x: Tensor, step: "_Step") -> Tensor:
        """This rank's partial sum of what attention, or what carries states in its place, adds."""
        if w.mixer is not None:
            assert step.carried is not None
            mixed = w.mixer(x, step.carried, step.product)
            return mixed.zero_() if self._group.rank else mixed  # all ranks have it whole
        assert w.out is not None
        gate = None if w.gate is None else step.product(w.gate, x)
        if w.latent is not None:
            attended = self._latent(w, w.latent, x, step)
        else:
            assert w.qkv is not None
            qkv = step.product(w.qkv, x)
            if w.gated is not None:
                qkv, gate = split_gates(qkv.unflatten(1, (-1, self.spec.head_size)), w.gated)
            attended = step.attend(w.place, self._heads(w, qkv, step), w.layout, w.scores)
        if gate is not None and self.spec.gate is not None:
            gate = GATES[self.spec.gate.activation](gate.float()).to(x.dtype)
            each = (self.weights.num_heads, -1)
            attended = (attended.unflatten(1, each) * gate.unflatten(1, each)).flatten(1)
        return step.product(w.out, attended)

    def _heads(self, w: Layer, qkv: Tensor, step: "_Step") -> Tensor:
        """Query, key and value heads (T, H + 2 K, D), in the order of ``w.layout``; rotated where
        positions are rotary, unless `_Step.attend` does that.
        """
        num_heads, num_kv_heads = self.weights.num_heads, self.weights.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, self.spec.head_size)
        norms, rotary = w.qk_norms, w.rotary
        kernels = None if self.spec.heads_apart else step.kernels
        by_torch = kernels is None and not step.attend_rotates
        rotates_first = self.spec.rotates_first
        together = self._group if self.spec.whole_qk_norm else None
        if norms is not None and not rotates_first and (by_torch or together):
            self._norm.heads(norms, [heads[:, w.layout.q], heads[:, w.layout.k]], together)
            norms = None
        if step.attend_rotates:
            return heads
        rows = None if rotary is None else step.rows.get(rotary)
        by_kernel = None
        if rotary is not None and rows is None:
            by_kernel = step.positions, rotary.cos, rotary.sin
        if kernels is not None and (norms is not None or by_kernel is not None):
            how = self.spec.norm_eps, self.spec.norm_offset
            scales = None if norms is None else (norms[0].weight, norms[1].weight, *how)
            kernels.norm_and_rotate(heads, num_heads, num_kv_heads, scales, by_kernel)
        if rotary is not None and rows is not None:
            for part in w.layout.rotated:
                rotary.rotate_(heads[:, part], rows)
        if norms is not None and rotates_first:
            self._norm.heads(norms, [heads[:, w.layout.q], heads[:, w.layout.k]], together)
        if step.query_scales is not None:
            heads[:, w.layout.q].mul_(step.query_scales)
        return heads

    def _latent(self, w: Layer, latent: Latent, x: Tensor, step: "_Step") -> Tensor:
        """(T, E) -> what attention returns, (T, H * value size)."""
        rotate = None
        if w.rotary is not None:
            rotate = partial(w.rotary.rotate_, rows=step.rows[w.rotary])

        def norm(how: Norm, rows: Tensor, following: AnyLinear, eps: float) -> Tensor:
            return self._add_norm(how, rows, None, step, following, eps)

        heads = latent.heads(x, self.spec.head_size, step.product, norm, rotate)
        if step.query_scales is not None:
            heads[:, w.layout.q].mul_(step.query_scales)
        return latent.values(step.attend(w.place, heads, w.layout, w.scores), self.spec.head_size)

    def _mlp(self, w: Layer, x: Tensor, step: "_Step") -> Tensor:
        """This rank's partial sum of the MLP."""
        if not isinstance(w.mlp, Experts):
            return self._dense(w.mlp, x, step)
        total = self._experts(w.mlp, x, step)
        if w.shared is None:
            return total
        beside = self._dense(w.shared, x, step)
        if w.shared_gate is not None:
            beside = beside.mul_(step.product(w.shared_gate, x).sigmoid_())
        return total.add_(beside)

    def _experts(self, experts: Experts, x: Tensor, step: "_Step") -> Tensor:
        cuda, spec, stacks = step.cuda, experts.spec, experts.stacks
        activation, is_interleaved = self.spec.activation, experts.ups[0].interleaved
        num_choices = len(x) * spec.per_token
        if not (cuda and stacks and cuda.takes_experts(stacks, num_choices, activation)):
            return experts(
                x, lambda inner: self._gated(inner, True, step, is_interleaved), step.keep_experts
            )
        if spec.is_usual:
            logits = cuda.linear(experts.router, x)
            chosen, shares = cuda.choose_experts(logits, spec.per_token, spec.renormalized)
        else:
            chosen, shares = experts.choose(x)
            shares = shares.to(x.dtype)
        if step.keep_experts is not None:
            step.keep_experts(experts.layer, chosen, spec.count)
        return cuda.experts(stacks, x, chosen, shares, activation, spec.clamped, is_interleaved)

    def _dense(self, mlp: Mlp, x: Tensor, step: "_Step") -> Tensor:
        spec, cuda = self.spec, step.cuda
        if cuda is not None and cuda.takes(mlp.up, x, spec.activation):
            inner = cuda.product(mlp.up, x, spec.activation, spec.gated, mlp.is_gate_first)
            return cuda.linear(mlp.down, inner)
        inner = step.product(mlp.up, x)
        if spec.gated:
            return step.product(mlp.down, self._gated(inner, mlp.is_gate_first, step))
        return step.product(mlp.down, self._activation(inner))

    def _gated(
        self, inner: Tensor, is_gate_first: bool, step: "_Step", is_interleaved: bool = False
    ) -> Tensor:
        """(..., 2 I), gate and up one after the other or ``is_interleaved``, -> (..., I)."""
        clamped = self.spec.experts.clamped if self.spec.experts is not None else None
        is_usual = self._activation is F.silu and clamped is None and not is_interleaved
        if step.kernels is not None and is_usual:
            return step.kernels.silu_mul(inner)
        if step.cuda is not None and clamped is None and not is_interleaved:
            gated = step.cuda.gate(inner, self.spec.activation, is_gate_first)
            if gated is not None:
                return gated
        halves = inner.unflatten(-1, (-1, 2)).unbind(-1) if is_interleaved else inner.chunk(2, -1)
        gate, up = halves if is_gate_first else halves[::-1]
        if clamped is None:
            return self._activation(gate).mul_(up)
        factor, limit = clamped
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate.mul(factor).sigmoid_().mul_(gate).mul_(up.add_(1))

    def _add_norm(
        self,
        norm: Norm | None,
        h: Tensor,
        added: Tensor | None,
        step: "_Step",
        following: AnyLinear | None = None,
        eps: float | None = None,
    ) -> Tensor:
        """``h`` += ``added``, in place; returns its norm, which is multiplied by ``following``, or
        without ``norm`` itself. ``eps``: None: the model's.
        """
        eps = self.spec.norm_eps if eps is None else eps
        if norm is None:
            return h if added is None else h.add_(added)
        how = norm.weight, norm.bias, eps, norm.offset
        if step.kernels is not None:
            return step.kernels.add_norm(h, added, *how)
        if step.cuda is not None and step.cuda.runs("norm"):
            return step.cuda.add_norm(h, added, *how, read_by(following))
        return self._norm(norm, h if added is None else h.add_(added), eps)


class _Step(NamedTuple):
    """State that the layers of one step share."""

    attend: Attend
    positions: Tensor  # (T,)
    kernels: cpu.Kernels | None = None  # None: torch's operations (GPUs, large steps)
    rows: Mapping[Rotary, tuple[Tensor, Tensor]] = {}  # cos and sin, unless kernels rotate
    query_scales: Tensor | None = None  # (T, 1, 1)
    cuda: StepKernels | None = None
    attend_rotates: bool = False  # and applies the norms of each head
    keep_experts: KeepExperts | None = None
    carried: Carried | StatefulRows | None = None

    def product(self, linear: AnyLinear, x: Tensor) -> Tensor:
        return linear(x) if self.cuda is None else self.cuda.linear(linear, x)
