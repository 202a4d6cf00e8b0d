"""Finds what a causal LM of transformers is built of: which of its weights are queries, keys and
values, gates, norms or experts, and how their results are added up.

Roles follow from names and from what reads what in a `Trial`; then each part is computed as the
decoder computes it, and compared. No family is known by its name. A part that the decoder does not
compute, or a weight without a role, is a reason why it cannot run the model.

Shapes: T tokens, E hidden size, H query and K key-value heads, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat.inference.model.decoder_trial import check_decoder
from dschat.inference.model.findings import Findings, NotFound, is_close, need, ratio
from dschat.inference.model.latent_roles import in_pairs, latent_roles
from dschat.inference.model.mlp_roles import mlp_roles
from dschat.inference.model.positions import Rotary
from dschat.inference.model.published import published_sources
from dschat.inference.model.spec import ModelSpec, UnsupportedModel, WeightSource
from dschat.inference.model.trial import LINEAR, Attended, Call, Trial
from dschat.models.long_rows import num_positions

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# In the settings of rotary positions: what queries grow by beyond the original length.
_GROWTH = "llama_4_scaling_beta"


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
        place = calls[0].name.removeprefix(f"{base}.0.")
        names = [call.name for call in calls]
        expected = [f"{base}.{n}.{place}" for n in range(len(self.module(base)))]
        need(names == expected, "not every layer has one attention")
        shapes = {(call.q.shape, call.k.shape, call.v.shape) for call in calls}
        need(len(shapes) == 1, "layers have heads of other sizes")
        need(not any(call.how.chunk for call in calls), "its attention is chunked")
        causal = (getattr(self.module(name), "is_causal", True) for name in names)
        need(all(causal), "it attends to later tokens")
        self._size = calls[0].q.shape[2]

    @torch.inference_mode(False)
    @torch.no_grad()
    def spec(self) -> ModelSpec:
        trial, calls, base = self.trial, self.attended, self.trial.layers
        self._front()
        found = [self._layer(n) for n in range(len(calls))]
        ropes = tuple(rope for rope, _ in found)
        scales = tuple(c.how.scale * scale for c, (_, scale) in zip(calls, found, strict=True))
        self._back()
        self._check_all_taken()
        published = published_sources(trial.model, self.sources)
        need(published is not None, "published checkpoints have other tensors")
        assert published is not None
        windows = tuple(call.how.window for call in calls)
        is_usual = all(abs(scale * self._size**0.5 - 1) < 1e-6 for scale in scales)
        rotary, facts = any(rope is not None for rope in ropes), self.facts
        if experts := facts.get("experts"):
            facts.setdefault("intermediate_size", experts.size)
        return ModelSpec(
            num_layers=len(calls),
            hidden_size=self.called(f"{base}.0").inputs[0].shape[-1],
            num_heads=calls[0].q.shape[1],
            num_kv_heads=calls[0].k.shape[1],
            head_size=self._size,
            vocab_size=trial.shapes[self.weight_of(trial.model.get_output_embeddings())][0],
            sources=(*self.sources, *published),
            prefix=f"{trial.model.base_model_prefix}.",
            max_positions=num_positions(self.config),
            rotary=rotary,
            ropes=ropes if rotary and set(ropes) != {""} else (),
            windows=windows if any(windows) else (),
            attention_scales=() if is_usual else scales,
            attention_softcap=calls[0].how.softcap,
            **facts,
        )

    # -- attention ---------------------------------------------------------------------------------

    def _layer(self, n: int) -> tuple[str | None, float]:
        """Find the roles in layer ``n``; its rotary positions, and the scale of its queries."""
        name, attended = f"{self.trial.layers}.{n}", self.attended[n]
        target, inside = f"layers.{n}", f"{attended.name}."
        calls = [call for call in self.trial.calls if call.name.startswith(f"{name}.")]
        place = calls.index(attended)
        before, after = (
            [call for call in part if isinstance(call, Call) and call.name.startswith(inside)]
            for part in (calls[:place], calls[place + 1 :])
        )
        linears = [call for call in before if type(call.module) in LINEAR]
        norms = [call for call in before if self.is_norm(call.module)]
        need(linears, "no linear layer precedes attention")
        x = self.read(linears[0])
        if all(is_close(self.read(call), x) for call in linears):
            heads = self._qkv(linears, attended, target)
            if norms:
                heads = self._normed_heads(norms, heads, target)
            rope, scale = self._positions(n, heads, attended)
        else:
            heads, shown = latent_roles(self, linears, norms, attended, target)
            try:
                rope, scale = self._positions(n, heads, shown)
            except NotFound:
                rope, scale = self._positions(n, heads, in_pairs(shown))
        outs = [call for call in after if type(call.module) in LINEAR]
        is_one = len(outs) == 1 and is_close(self.read(outs[0]), attended.output)
        need(is_one, "attention is not followed by one linear layer")
        self.take(outs[0].module, f"{target}.out")
        if attended.how.sinks is not None:
            parameters = self.module(attended.name).named_parameters(recurse=False)
            sinks = [key for key, p in parameters if p.shape == attended.how.sinks.shape]
            need(len(sinks) == 1, "its sinks are no weights")
            self.sources.append(WeightSource(f"{inside}{sinks[0]}", f"{target}.sinks.weight"))
        outer = [c for c in calls if isinstance(c, Call) and not c.name.startswith(inside)]
        others = [call for call in outer if call.name != attended.name]
        mlp = mlp_roles(self, [c for c in others if not self.is_norm(c.module)], target)
        sums = x, self.result(outs[0]), *mlp
        self._residuals(self.called(name), [c for c in others if self.is_norm(c.module)], sums)
        return rope, scale

    def _qkv(self, calls: list[Call], attended: Attended, target: str) -> list[Tensor]:
        """Query and key heads (T, H or K, D) of linear layers, whose values attention gets."""
        num_heads, num_kv_heads, size = attended.q.shape[1], attended.k.shape[1], self._size
        need(attended.v.shape == attended.k.shape, "values have another size than keys")
        counts = [num_heads * size, num_kv_heads * size, num_kv_heads * size]
        if len(calls) == 1:
            y = self.result(calls[0])
            need(y.shape[1] == sum(counts), "fused queries, keys and values have another size")
            q, k, v = y.split(counts, -1)
            interleaved = num_heads == num_kv_heads and not is_close(v, attended.v.flatten(1))
            if interleaved:
                q, k, v = (x.flatten(1) for x in y.view(-1, num_heads, 3, size).unbind(2))
            self.take(calls[0].module, f"{target}.qkv", "", interleaved)
        else:
            inside = f"{attended.name}."
            firsts = (c.name.removeprefix(inside).lower().removeprefix("w")[0] for c in calls)
            parts = dict(zip(firsts, calls, strict=True))
            is_known = len(calls) == 3 and set(parts) == set("qkv")
            need(is_known, "queries, keys and values are not three linear layers, or one")
            for part in "qkv":
                self.take(parts[part].module, f"{target}.qkv", part)
            q, k, v = (self.result(parts[part]) for part in "qkv")
        need(is_close(v, attended.v.flatten(1)), "values are not those of a linear layer")
        return [x.reshape(len(x), -1, size) for x in (q, k)]

    def _normed_heads(self, calls: list[Call], heads: list[Tensor], target: str) -> list[Tensor]:
        need(len(calls) == 2, f"{len(calls)} norms of queries and keys")
        outputs = []
        for call, x, part in zip(calls, heads, "qk", strict=True):
            size = call.module.weight.numel()
            need(call.module in self.rms, "norms of queries and keys are no RMS norms")
            is_whole = size == x.shape[1] * x.shape[2] != self._size
            need(is_whole or size == self._size, "norms of queries and keys have another size")
            self.fact(whole_qk_norm=is_whole)
            read = x.flatten(1) if is_whole else x
            given, y = call.inputs[0], call.module(read)
            if given.shape[:3] == (1, x.shape[1], len(x)):  # heads before tokens
                given = given.transpose(1, 2)
            need(is_close(self.rows(given), x.flatten(1)), "heads are rotated before their norm")
            self.take_norm(call, f"{target}.{part}_norm", read, y)
            outputs.append(y.view(x.shape))
        return outputs

    def _positions(
        self, n: int, heads: list[Tensor], attended: Attended
    ) -> tuple[str | None, float]:
        """The rotary positions of layer ``n``, and what its queries are multiplied by."""
        (q, k), positions = heads, self.trial.positions
        if is_close(k, attended.k) and (scale := ratio(attended.q, q)) is not None:
            return None, scale
        given = getattr(self.config, "rope_parameters", None) or {}
        kind = "" if "rope_type" in given else self.config.layer_types[n] if given else ""
        settings = given.get(kind, given)
        need(settings, "queries and keys are not those of linear layers and norms")
        how = settings.get("rope_type")
        need(how in ROPE_TYPES, f"rotary positions of the type {how} are not supported")
        for partial in (False, True):
            for interleaved in (False, True):
                facts = {"partial_rotary": partial, "interleaved_rotary": interleaved}
                if any(self.facts.get(key, value) != value for key, value in facts.items()):
                    continue
                rotary = self._rotary(kind, facts)
                if rotary.dim > q.shape[2] or rotary.dim % 2:
                    continue
                turned = q.clone(), k.clone()
                for x in turned:
                    rotary.rotate_(x, rotary.rows(positions))
                if not is_close(turned[1], attended.k):
                    continue
                scale, growth = ratio(attended.q, turned[0]), None
                if scale is None and (factor := settings.get(_GROWTH)):
                    growth = factor, settings["original_max_position_embeddings"]
                    steps = torch.log1p(positions // growth[1]).view(-1, 1, 1)
                    scale = ratio(attended.q, turned[0] * (1 + factor * steps))
                need(scale is not None, "queries are changed in another way")
                assert scale is not None
                self.fact(**facts, query_growth=growth)
                return kind, scale
        raise NotFound("its positions are not rotary ones of a known kind")

    def _rotary(self, kind: str, facts: dict[str, bool]) -> Rotary:
        sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "num_kv_heads"), 0)
        sizes |= {"head_size": self._size, "intermediate_size": 0, "vocab_size": 0}
        known: dict[str, Any] = {**sizes, **facts, "latent": self.facts.get("latent")}
        spec = ModelSpec(**known, sources=(), prefix="", activation="")
        longest = int(self.trial.positions[-1]) + 1
        return Rotary(spec, self.config, kind, longest, torch.float32, torch.device("cpu"))

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
        last = self.called(f"{trial.layers}.{len(self.attended) - 1}")
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
