"""Finds the roles in attention whose keys and values come from a latent, see `LatentSpec`.

Shapes: T tokens, H heads, D' rotated elements of a head.
"""

from collections.abc import Sequence

from torch import Tensor

from dschat.inference.model.findings import Findings, is_close, need, ratio
from dschat.inference.model.spec import LatentSpec
from dschat.inference.model.trial import Attended, Call


def latent_roles(
    found: Findings,
    linears: Sequence[Call],
    norms: Sequence[Call],
    attended: Attended,
    target: str,
) -> tuple[list[Tensor], Attended]:
    """What is rotated of queries (T, H, D') and of keys (T, 1, D'), and what attention gets of it.

    ``linears``, ``norms``: those before ``attended``.
    """
    x, size, value_size = found.read(linears[0]), attended.q.shape[2], attended.v.shape[2]
    firsts = [call for call in linears if is_close(found.read(call), x)]
    seconds = [call for call in linears if call not in firsts]
    roles: dict[str, Call] = {}
    for call in seconds:
        rank = found.read(call).shape[1]
        for norm in norms:
            if not is_close(found.result(norm), found.read(call)):
                continue
            for first in firsts:
                y = found.result(first)
                if is_close(y[:, :rank], found.read(norm)):
                    part = "q" if y.shape[1] == rank else "kv"
                    roles |= {f"{part}_a": first, f"{part}_a_norm": norm, f"{part}_b": call}
    if "q_a" not in roles:
        others = [call for call in firsts if call is not roles.get("kv_a")]
        need(len(others) == 1, "queries are not those of one linear layer")
        roles["q_b"] = others[0]
    need(value_size <= size, "values are larger than keys")
    is_known = "kv_b" in roles and len(roles) == len(linears) + len(norms)
    need(is_known, "queries, keys and values have several inputs")
    rank, query_rank = (
        found.read(roles[name]).shape[1] if name in roles else 0 for name in ("kv_b", "q_a_norm")
    )
    rotated = found.result(roles["kv_a"]).shape[1] - rank
    plain = size - rotated
    q = found.result(roles["q_b"]).unflatten(1, (-1, size))
    pairs = found.result(roles["kv_b"])
    need(pairs.shape[1] == q.shape[1] * (plain + value_size), "heads have other sizes")
    pairs = pairs.unflatten(1, (-1, plain + value_size))
    need(is_close(pairs[..., plain:], attended.v), "values are not those of a linear layer")
    need(is_close(pairs[..., :plain], attended.k[..., :plain]), "keys are changed")
    need(ratio(attended.q[..., :plain], q[..., :plain]) is not None, "queries are changed")
    of_norms = [found.rms.get(roles[n].module) for n in ("kv_a_norm", "q_a_norm") if n in roles]
    eps = {None if norm is None else norm.eps for norm in of_norms}
    need(len(eps) == 1 and None not in eps, "norms of latents are no RMS norms, or differ")
    spec = LatentSpec(rank, query_rank, rotated, value_size, eps.pop() or 0.0)
    found.fact(
        latent=spec,
        heads_apart=True,
        norm="rmsnorm",
        norm_offset=next(n.offset for n in of_norms if n),
    )
    for name, call in roles.items():
        found.take(call.module, f"{target}.{name}")
    shown = attended._replace(q=attended.q[..., plain:], k=attended.k[:, :1, plain:])
    return [q[..., plain:], found.result(roles["kv_a"])[:, None, rank:]], shown


def in_pairs(attended: Attended) -> Attended:
    """With adjacent elements where a family's rotation moves them to both halves of a head."""
    q, k = (x.unflatten(-1, (2, -1)).mT.flatten(-2) for x in (attended.q, attended.k))
    return attended._replace(q=q, k=k)
