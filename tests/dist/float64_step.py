"""One iteration of step 3 in float64, written from the papers, sequence by sequence.

From an experience's ids, scores, values and log-probs, plain float64 models and the flags it
computes advantages, losses with their graph, and every metric. `dschat.losses` is not used.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch

KL_TERMS = {  # of d = log policy - log reference (joschu.net/blog/kl-approx.html)
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
}


def answer_logprobs(model, e, temperature):
    """For each answer the log-probs (n, V) of what each of its tokens was drawn from."""
    table = torch.log_softmax(model(e.input_ids).logits / temperature, dim=-1)
    return [row[answer_columns(e, i)] for i, row in enumerate(table)]


def answer_columns(e, i):
    """Where answer ``i``'s tokens are predicted: a causal model needs no mask to the right."""
    return slice(int(e.prompt_lengths[i]) - 1, int(e.lengths[i]) - 1)


def token_scores(model, e):
    """A classifier's score at every token: (S, T)."""
    return model.score(model.model(e.input_ids).last_hidden_state).squeeze(-1)


def recorded(e, args):
    """What an experience says of each answer."""
    known = []
    for i in range(e.num_sequences):
        ids = e.input_ids[i, e.prompt_lengths[i] : e.lengths[i]]
        of_actions = {"ref": "ref_logprobs", "old": "logprobs", "drawn": "rollout_logprobs"}
        of_actions["values"] = "values"
        known.append(
            SimpleNamespace(
                ids=ids.tolist(),
                n=len(ids),
                group=int(e.numbers[i]) // args.num_samples_per_prompt,
                finished=bool(e.finished[i]),
                score=float(e.scores[i]),
                sources=dict(e.source_scores[i]) if e.source_scores else {},
                **{to: getattr(e, of)[i, : len(ids)].double() for to, of in of_actions.items()},
            )
        )
    return known


def answers(e, args, actor, reference):
    """What is known of each answer before the update; the new log-probs carry a graph."""
    known, new = recorded(e, args), answer_logprobs(actor, e, args.temperature)
    with torch.no_grad():
        ref = answer_logprobs(reference, e, args.temperature)
    for i, a in enumerate(known):
        picked = torch.arange(a.n), torch.tensor(a.ids)
        a.new, a.ref = new[i][picked], ref[i][picked]
        a.entropy = -(new[i].exp() * new[i]).sum(-1)
    return known


def shape(a, args, kl_coef, bound):
    """Rewards of one answer's tokens: KL at each, everything else at the last."""
    kl = KL_TERMS[args.kl_by](a.old - a.ref)
    rewards = torch.zeros_like(kl) if args.kl_is_in_loss else -kl_coef * kl
    clipped = a.score if bound is None else min(max(a.score, -bound), bound)
    score = clipped
    if not a.finished:
        score -= args.missing_eos_penalty
    over = a.n - (args.max_answer_seq_len - args.overlong_buffer_len)
    if args.overlong_buffer_len and over > 0:
        score -= args.overlong_penalty * over / args.overlong_buffer_len
    a.sources = getattr(a, "sources", {}) | {"penalties": score - clipped}
    rewards[-1] += score
    a.rewards, a.outcome = rewards, score


def gae(a, gamma, lam):
    """arXiv 1506.02438, eq. 16; nothing comes after the last action."""
    out, advantage = torch.zeros(a.n, dtype=torch.float64), 0.0
    for t in reversed(range(a.n)):
        after = a.values[t + 1] if t + 1 < a.n else 0.0
        delta = a.rewards[t] + gamma * after - a.values[t]
        out[t] = advantage = delta + gamma * lam * advantage
    return out


def discounted(rewards, gamma):
    n = len(rewards)
    sums = [sum(gamma ** (k - t) * float(rewards[k]) for k in range(t, n)) for t in range(n)]
    return torch.tensor(sums, dtype=torch.float64)


def compared(total, totals, kind):
    """One answer's advantage among those of its prompt."""
    mean = np.mean(totals)
    if len(totals) == 1:
        return 0.0  # nothing to compare with
    if kind == "grpo":  # arXiv 2402.03300, section 4.1.2; the deviation with n - 1
        return float((total - mean) / (np.std(totals, ddof=1) + 1e-6))
    if kind == "dr_grpo":  # arXiv 2503.20783
        return float(total - mean)
    assert kind == "rloo", f"no formula of {kind} here"  # arXiv 2402.14740
    return float(total - (sum(totals) - total) / (len(totals) - 1))


def by_source(answer, group, args):
    """The weighted sum of GRPO's advantages of each source; penalties are one of weight 1."""
    total = 0.0
    for name, weight in (args.source_weights | {"penalties": 1.0}).items():
        scores = [a.sources[name] for a in group if name in a.sources]
        if name in answer.sources:
            total += weight * compared(answer.sources[name], scores, "grpo")
    return total


def advantages(known, args):
    """Fills in ``advantages`` (n,) and, for a critic, ``returns``."""
    kind = args.advantage_estimator
    whitened = kind.startswith("reinforce_pp") or (kind == "gae" and args.whiten_advantages)
    whitened |= kind == "gdpo"
    for a in known:
        group = [b for b in known if b.group == a.group]
        totals = [float(b.rewards.sum()) for b in group]
        total = float(a.rewards.sum())
        if kind == "gdpo":  # arXiv 2601.05242, section 3: by source, then whitened
            a.advantages = torch.full((a.n,), by_source(a, group, args), dtype=torch.float64)
        elif kind == "gae":
            a.advantages = gae(a, args.gamma, args.lam)
            a.returns = a.advantages + a.values
        elif kind.startswith("reinforce"):
            rewards = a.rewards.clone()
            if kind == "reinforce_pp_baseline":  # arXiv 2501.03262: the score less its group's mean
                rewards[-1] -= np.mean([b.outcome for b in group])
            a.advantages = discounted(rewards, args.gamma)
        else:
            one = compared(total, totals, kind)
            a.advantages = torch.full((a.n,), one, dtype=torch.float64)
    if whitened:
        every = torch.cat([a.advantages for a in known])
        mean, std = every.mean(), (every.var(unbiased=False) + 1e-8).sqrt()
        for a in known:
            a.advantages = (a.advantages - mean) / std


def weigh(a, args):
    """Importance weights against the rollout: truncated, or dropped outside of the range."""
    ratio = (a.old - a.drawn).exp()
    low, high = args.importance_range
    a.weights, a.cut, of_answer = torch.ones_like(ratio), 0, float(ratio.prod())
    if args.rollout_is == "tis":
        a.weights, a.cut = ratio.clamp(max=high), int((ratio > high).sum())
    if args.rollout_is == "icepop":
        is_out = (ratio < low) | (ratio > high)
        a.weights, a.cut = torch.where(is_out, 0.0, ratio), int(is_out.sum())
    if args.rollout_is == "seq_tis":  # verl: rollout_is "sequence", truncated
        a.weights *= min(of_answer, high)
        a.cut = a.n * (of_answer > high)
    if args.rollout_is == "seq_mask":  # TRL: vllm_importance_sampling_mode "sequence_mask"
        kept = low <= of_answer <= high
        a.weights *= of_answer * kept
        a.cut = a.n * (not kept)
    if args.rollout_is == "geo_mask":  # OpenRLHF: is_correction_level seq, mode mask
        kept = low <= of_answer ** (1 / a.n) <= high
        a.weights, a.cut = ratio * kept, a.n * (not kept)
    a.dropped = not a.weights.any()


def token_losses(a, args):
    """(n,) with a graph, and how many have no gradient because a clip took it."""
    low, high = args.cliprange_sides
    ratio, adv = (a.new - a.old).exp(), a.advantages
    if args.policy_loss == "sapo":  # arXiv 2511.20347, eq. 5 and 6
        tau = torch.where(adv > 0, torch.tensor(high), torch.tensor(low)).double()
        return -adv * 4 / tau / (1 + (tau * (1 - ratio)).exp()), 0
    if args.policy_loss == "cispo":  # arXiv 2506.13585, eq. 4
        near = ratio.detach().clamp(1 - low, 1 + high)
        return -near * adv * a.new, int((near != ratio.detach()).sum())
    if args.policy_loss == "gspo":  # arXiv 2507.18071, eq. 7 and 14
        ratio = (a.new - a.old).mean().exp().detach() * (a.new - a.new.detach()).exp()
    near = ratio.clamp(1 - low, 1 + high)
    objective = torch.minimum(ratio * adv, near * adv)  # arXiv 1707.06347, eq. 7
    is_clipped = near * adv < ratio * adv
    if args.dual_clip is not None:  # arXiv 1912.09729, eq. 5
        floor = args.dual_clip * adv
        is_bounded = (adv < 0) & (floor > objective)
        objective = torch.where(is_bounded, floor, objective)
        is_clipped |= is_bounded
    return -objective, int(is_clipped.sum())


def aggregate(per_answer, args):
    """Token means, or means over answers of means, or of sums / the longest answer."""
    if args.aggregation == "token":
        return sum(x.sum() for x in per_answer) / sum(map(len, per_answer))
    size = (
        (lambda x: len(x)) if args.aggregation == "sequence" else lambda x: args.max_answer_seq_len
    )
    return sum(x.sum() / size(x) for x in per_answer) / len(per_answer)


def value_losses(a, values, epsilon):
    """(n,) with a graph, and how many are clipped (arXiv 2005.12729, section 3)."""
    near = a.values + (values - a.values).clamp(-epsilon, epsilon)
    plain, clipped = (values - a.returns) ** 2, (near - a.returns) ** 2
    return torch.maximum(plain, clipped) / 2, int((clipped > plain).sum())


def iteration(e, args, bound, actor, reference, critic=None):
    """Everything of one iteration that is one optimizer step: (answers, losses, metrics).

    ``bound``: what scores are clipped to, or None.
    """
    known = answers(e, args, actor, reference)
    for a in known:
        shape(a, args, args.kl_weight, bound)
        weigh(a, args)
    advantages(known, args)
    count, tokens = len(known), sum(a.n for a in known)

    def mean(of, number=tokens):
        return sum(float(of(a).detach().sum()) for a in known) / number

    looks = args.old_logprobs == "rollout"
    metrics = {
        "objective/kl": mean(lambda a: a.old - a.ref, count),
        "objective/scores": np.mean([a.score for a in known]),
        "objective/scores_std": np.std([a.score for a in known]),
        "rollout/answer_length": tokens / count,
        "rollout/prompt_length": float(e.prompt_lengths.double().mean()),
        "objective/rlhf_reward": mean(lambda a: a.rewards, count),
        "rollout/eos_share": np.mean([a.finished for a in known]),
        # From what the generator drew, so KL(generator || training): k3 of log-prob differences.
        "rollout/logprob_gap": mean(lambda a: (a.drawn - (a.new if looks else a.old)).abs()),
        "rollout/mismatch_kl": mean(
            lambda a: KL_TERMS["k3"](a.drawn - (a.new if looks else a.old))
        ),
    }
    if not looks:
        metrics["objective/entropy"] = mean(lambda a: a.entropy)
    if bound is not None:
        metrics["objective/clipped_share"] = np.mean([abs(a.score) > bound for a in known])
    if args.rollout_is != "off":
        metrics["rollout/is_weight"] = mean(lambda a: a.weights)
        metrics["rollout/is_cut_share"] = sum(a.cut for a in known) / tokens
        metrics["rollout/is_dropped_share"] = sum(a.dropped for a in known) / count
    coef = args.kl_weight  # arXiv 1909.08593, section 2.2: after this rollout
    if args.kl_target is not None:
        error = min(max(metrics["objective/kl"] / args.kl_target - 1, -0.2), 0.2)
        coef *= 1 + error * min(count / args.kl_horizon, 1)
    metrics["kl.value"] = coef

    learned = [a for a in known if a.finished or not args.overlong_filter]
    parts = [token_losses(a, args) for a in learned]
    for a in learned:  # arXiv 2512.02556, eq. 9
        a.left = args.off_policy_mask_threshold is not None and (a.advantages < 0) & bool(
            (a.drawn - a.new.detach()).mean() > args.off_policy_mask_threshold
        )
        a.weights = torch.where(torch.as_tensor(a.left), 0.0, a.weights)
    policy = aggregate([x * a.weights for (x, _), a in zip(parts, learned, strict=True)], args)
    entropy = aggregate([a.entropy for a in learned], args)
    loss = policy - args.entropy_coef * entropy
    num_learned = sum(a.n for a in learned)
    difference = torch.cat([(a.new - a.old).detach() for a in learned])
    metrics |= {
        "loss/policy_avg": float(policy.detach()),
        "policy/clipfrac_avg": sum(clipped for _, clipped in parts) / num_learned,
        "policy/approxkl_avg": float((difference**2).mean()) / 2,
        "val/ratio": float(difference.exp().mean()),
        "val/ratio_abs_dev": float((difference.exp() - 1).abs().mean()),
    }
    if args.off_policy_mask_threshold is not None:
        metrics["policy/off_policy_share"] = sum(int(a.left.sum()) for a in learned) / num_learned
    if args.entropy_coef:
        metrics["loss/entropy_avg"] = float(entropy.detach())
    if args.kl_is_in_loss:
        kls = [KL_TERMS[args.kl_by](a.new - a.ref) for a in learned]
        if args.use_bias_correction_kl:
            kls = [kl * (a.new - a.old).exp() for kl, a in zip(kls, learned, strict=True)]
        kl = aggregate(kls, args)
        loss = loss + coef * kl
        metrics["loss/kl_avg"] = float(kl.detach())
    losses = {"actor": loss}
    if critic is not None:
        new = token_scores(critic, e)
        parts = [
            value_losses(a, new[i, answer_columns(e, i)], args.cliprange_value)
            for i, a in enumerate(known)
        ]
        losses["critic"] = sum(x.sum() for x, _ in parts) / tokens
        metrics |= {
            "loss/value_avg": float(losses["critic"].detach()),
            "val/clipfrac_avg": sum(clipped for _, clipped in parts) / tokens,
            "val/values": mean(lambda a: a.values),
            "val/returns": mean(lambda a: a.returns),
        }
    return known, losses, metrics


def norm(model):
    return math.sqrt(
        sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
    )
