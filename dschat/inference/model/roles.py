"""Finds what a causal LM of transformers is built of: which of its weights are queries, keys and
values, gates, norms or experts, and how their results are added up.

Roles follow from names and from what reads what in a `Trial`; then each part is computed as the
decoder computes it, and compared. No family is known by its name. A part that the decoder does not
compute, or a weight without a role, is a reason why it cannot run the model.

Shapes: T tokens, E hidden size, H query and K key-value heads, D head size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat.inference.model.attention_roles import attention_roles, mixers, states_of, take_mixer
from dschat.inference.model.decoder_trial import check_decoder
from dschat.inference.model.findings import Findings, NotFound, is_close, need, ratio
from dschat.inference.model.mlp_roles import mlp_roles
from dschat.inference.model.published import published_sources
from dschat.inference.model.spec import ModelSpec, UnsupportedModel
from dschat.inference.model.trial import LINEAR, Call, Trial
from dschat.models.long_rows import num_positions


def found_spec(trial: Trial) -> ModelSpec:
    """The architecture of ``trial``'s model.

    Raises:
        UnsupportedModel: a part of it is not found; the message names it.
    """
    try:
        roles = _Roles(trial)
        spec = roles.spec()
        check_decoder(spec, roles)
        return spec
    except NotFound as reason:
        raise UnsupportedModel(f"{type(trial.model).__name__}: {reason}") from None


class _Roles(Findings):
    @torch.no_grad()
    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self._check_attention()

    def _check_attention(self) -> None:
        calls, base = self.attended, self.trial.layers
        need(calls, "it does not call attention as transformers names it")
        names = [call.name for call in calls]
        places = [int(name.removeprefix(f"{base}.").partition(".")[0]) for name in names]
        self.by_layer, self.stateful = dict(zip(places, calls, strict=True)), mixers(self)
        need(
            sorted([*places, *self.stateful]) == [*range(len(self.module(base)))],
            "not every layer has one attention",
        )
        shapes = {(call.q.shape, call.k.shape, call.v.shape) for call in calls}
        need(len(shapes) == 1, "layers have heads of other sizes")
        need(not any(call.how.chunk for call in calls), "its attention is chunked")
        causal = (getattr(self.module(name), "is_causal", True) for name in names)
        need(all(causal), "it attends to later tokens")

    @torch.inference_mode(False)
    @torch.no_grad()
    def spec(self) -> ModelSpec:
        trial, calls, base = self.trial, self.attended, self.trial.layers
        self._front()
        layers = range(len(self.module(base)))
        ropes, scales, windows = zip(*map(self._layer, layers), strict=True)
        self._back()
        self._check_all_taken()
        published = published_sources(trial.model, self.sources)
        is_usual = all(abs(scale * self.head_size**0.5 - 1) < 1e-6 for scale in scales)
        width = self.called(f"{base}.0").inputs[0].shape[-1]
        rotary, facts = any(rope is not None for rope in ropes), self.facts
        if experts := facts.get("experts"):
            facts.setdefault("intermediate_size", experts.size)
        return ModelSpec(
            num_layers=len(layers),
            hidden_size=width,
            num_heads=calls[0].q.shape[1],
            num_kv_heads=calls[0].k.shape[1],
            head_size=self.head_size,
            vocab_size=trial.shapes[self.weight_of(trial.model.get_output_embeddings())][0],
            sources=(*self.sources, *(published or ())),
            reads_published=published is not None,
            prefix=f"{trial.model.base_model_prefix}.",
            max_positions=num_positions(self.config),
            rotary=rotary,
            ropes=ropes if rotary and set(ropes) != {""} else (),
            windows=windows if any(windows) else (),
            attention_scales=() if is_usual else scales,
            attention_softcap=calls[0].how.softcap,
            bare_norms=frozenset(self.bare_norms),
            states=states_of(self, width) if self.mixers else (),
            mixers=self.mixers,
            **facts,
        )

    def _layer(self, n: int) -> tuple[str | None, float, int | None]:
        """Find the roles in layer ``n``; its rotary positions, the scale of its scores, and its
        window.
        """
        name, target = f"{self.trial.layers}.{n}", f"layers.{n}"
        calls = [call for call in self.trial.calls if call.name.startswith(f"{name}.")]
        positions: tuple[str | None, float, int | None] = None, self.head_size**-0.5, None
        if n in self.stateful:
            inside = self.stateful[n].name
            sums = take_mixer(self, self.stateful[n], n)
        else:
            inside = self.by_layer[n].name
            *both, rope, scale = attention_roles(self, calls, self.by_layer[n], n)
            sums = both[0], both[1]
            how = self.by_layer[n].how
            positions = rope, how.scale * scale, how.window
        outer = [c for c in calls if isinstance(c, Call) and not c.name.startswith(f"{inside}.")]
        others = [call for call in outer if call.name != inside]
        mlp = mlp_roles(self, [c for c in others if not self.is_norm(c.module)], target)
        norms = [c for c in others if self.is_norm(c.module)]
        self._residuals(self.called(name), norms, (*sums, *mlp))
        return positions

    # -- what is added to what ---------------------------------------------------------------------

    def _residuals(self, layer: Call, norms: list[Call], sums: Sequence[Tensor]) -> None:
        """``sums``: what attention reads and returns, and what the MLP reads and returns."""
        h, out = self.read(layer), self.result(layer)
        attention_input, attended, mlp_input, mlp_output = sums
        target = f"layers.{layer.name.rpartition('.')[2]}"
        roles: dict[str, Call] = {}
        for norm in norms:
            x, y = self.read(norm), self.result(norm)
            if is_close(x, h):
                is_first = "norm1" not in roles and is_close(y, attention_input)
                role = "norm1" if is_first else "norm2"
            elif is_close(x, attended):
                role = "out_norm"
            elif is_close(x, mlp_output):
                role = "down_norm"
            else:
                role = "norm2" if "norm2" not in roles else "last"
            need(role not in roles, f"{norm.name} has no place that is known")
            roles[role] = norm

        def after(role: str, before: Tensor) -> Tensor:
            return self.result(roles[role]) if role in roles else before

        if "last" in roles:
            self._norms_follow(target, layer, norms, sums)
            return
        for role, norm in roles.items():
            self.take_norm(norm, f"{target}.{role}", self.read(norm), self.result(norm))
        need(is_close(after("norm1", h), attention_input), "attention reads something else")
        attended, mlp_output = after("out_norm", attended), after("down_norm", mlp_output)
        second = roles.get("norm2")
        parallel = is_close(mlp_input, attention_input)
        if second is not None:
            need(is_close(self.result(second), mlp_input), "the MLP reads something else")
            parallel = is_close(self.read(second), h)
        if parallel:
            is_plain = not {"out_norm", "down_norm"} & set(roles)
            scale = self.share(h, attended + mlp_output, out) if is_plain else None
        else:
            middle = mlp_input if second is None else self.read(second)
            scale = self.share(h, attended, middle)
            if scale != self.share(middle, mlp_output, out):
                scale = None
        need(scale is not None, "layers add up in another way")
        self.fact(pre_norm=True, parallel_residual=parallel, residual_scale=scale)

    def _norms_follow(
        self, target: str, layer: Call, norms: list[Call], sums: Sequence[Tensor]
    ) -> None:
        """Both ``norms`` are of sums; see `_residuals`."""
        need(len(norms) == 2, "norms in places that are not known")
        h, (first, second) = self.read(layer), norms
        attention_input, attended, mlp_input, mlp_output = sums
        middle = self.result(first)
        pairs = [
            (attention_input, h),
            (self.read(first), h + attended),
            (mlp_input, middle),
            (self.read(second), middle + mlp_output),
            (self.result(layer), self.result(second)),
        ]
        need(all(is_close(*pair) for pair in pairs), "layers add up in another way")
        for role, norm in (("norm1", first), ("norm2", second)):
            self.take_norm(norm, f"{target}.{role}", self.read(norm), self.result(norm))
        self.fact(pre_norm=False, parallel_residual=False, residual_scale=1.0)

    # -- before and behind the layers --------------------------------------------------------------

    def _front(self) -> None:
        """What turns ids into the first layer's input."""
        trial, base = self.trial, self.trial.layers
        start = next(i for i, c in enumerate(trial.calls) if c.name.startswith(f"{base}."))
        calls = [call for call in trial.calls[:start] if isinstance(call, Call)]
        embedding = trial.model.get_input_embeddings()
        x, h = embedding.weight[trial.ids], self.read(self.called(f"{base}.0"))
        self.take(embedding, "embed")
        self.fact(embed_size=x.shape[1] if x.shape[1] != h.shape[1] else 0)
        for call in calls:
            if type(call.module) in LINEAR:
                self.take(call.module, "project_in")
                x = call.module(x)
        scaled = h
        for call in calls:
            if self.is_norm(call.module):
                self.take_norm(call, "embed_norm", self.read(call), self.result(call))
                need(is_close(self.result(call), h), "embeddings are changed after their norm")
                scaled = self.read(call)
        tables = [
            c for c in calls if isinstance(c.module, nn.Embedding) and c.module is not embedding
        ]
        need(len(tables) < 2, "several tables of embeddings")
        for call in tables:
            weight, places = call.module.weight, self.result(call)
            last = len(weight) - int(trial.positions[-1])
            offsets = (n for n in range(last) if is_close(weight[trial.positions + n], places))
            offset = next(offsets, None)
            need(offset is not None, "positions are no rows of a table")
            self.fact(position_offset=offset, num_positions=len(weight))
            self.take(call.module, "positions")
            scaled = scaled - places
        scale = ratio(scaled, x)
        need(scale is not None, "embeddings are changed in another way")
        assert scale is not None
        self.fact(embed_scale=self.exact(scale, h.shape[1] ** 0.5))

    def _back(self) -> None:
        """What turns the last layer's output into logits."""
        trial = self.trial
        last = self.called(f"{trial.layers}.{len(self.module(trial.layers)) - 1}")
        end = next(i for i, call in enumerate(trial.calls) if call is last)
        calls = [call for call in trial.calls[end + 1 :] if isinstance(call, Call)]
        x, head = self.result(last), trial.model.get_output_embeddings()
        for call in calls:
            if self.is_norm(call.module):
                need(is_close(self.read(call), x), "the final norm reads something else")
                self.take_norm(call, "final_norm", x, self.result(call))
                x = self.result(call)
            elif type(call.module) in LINEAR and call.module is not head:
                self.take(call.module, "project_out")
                x = call.module(x)
        embedding = trial.model.get_input_embeddings()
        sizes = [trial.shapes[self.weight_of(module)][0] for module in (embedding, head)]
        need(sizes[0] == sizes[1], "embeddings and head differ in size")
        tied = head.weight is embedding.weight
        self.fact(tied=tied)
        self.take(embedding if tied else head, "head")
        y = F.linear(x, head.weight, None if tied else head.bias)
        need(not tied or head.bias is None, "a tied head with a bias")
        if (scale := ratio(trial.logits, y)) is not None:
            self.fact(logits_scale=self.exact(scale))
            return
        for cap in self.config.to_dict().values():
            if isinstance(cap, float) and cap and is_close(cap * torch.tanh(y / cap), trial.logits):
                self.fact(logits_softcap=cap)
                return
        raise NotFound("logits are changed in another way")

    def _check_all_taken(self) -> None:
        known = {source.name for source in self.sources}
        model, tied = self.trial.model, self.facts["tied"]
        head = self.weight_of(model.get_output_embeddings())
        left = [n for n in model.state_dict() if n not in known and not (tied and n == head)]
        need(not left, f"{left and left[0]} has no role")
