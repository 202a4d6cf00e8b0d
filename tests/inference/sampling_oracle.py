"""Exact distributions in NumPy float64, and a chi-squared test of draws against them."""

import numpy as np
import torch

DRAWS = 20_000
FEW = np.array([2.0, 1.5, 1.4, 0.3, 0.0, -0.5, -1.0, -3.0, -9.0, 1.45])
MANY = np.random.default_rng(5).normal(size=1000).astype(np.float32).astype(np.float64)
ALMOST_ONE = 1 - 2.0**-53
EVERY_WAY = [
    {},
    {"temperature": 0.7},
    {"temperature": 0},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.5},
]


def log_softmax(logits, temperature=1.0):
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    shifted = scaled - scaled.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, without=()):
    """The distribution after prohibition and temperature, then top-k, top-p, min-p, token by
    token.
    """
    p = np.exp(log_softmax(logits, temperature))
    p[list(without)] = 0
    order = np.argsort(-p)
    kept = list(order[:top_k] if top_k else order)
    mass = sum(p[kept])
    nucleus, total = [], 0.0
    for token in kept:
        if total >= top_p * mass and nucleus:
            break
        nucleus.append(token)
        total += p[token]
    best = max(p[nucleus])
    result = np.zeros_like(p)
    for token in nucleus:
        if p[token] >= min_p * best:
            result[token] = p[token]
    return result / result.sum()


def counters(count):
    index = torch.arange(count)
    return index // 100, index % 10, index // 10 % 10


def p_value(counts, expected):
    """Of the chi-squared test; what is expected less than ten times is counted together."""
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    if len(counts) == 1:
        return 1.0 if counts[0] == round(expected[0]) else 0.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def assert_drawn_from(ids, expected):
    counts = np.bincount(ids.numpy(), minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "drew a token that was excluded"
    kept = expected > 0
    assert p_value(counts[kept], len(ids) * expected[kept]) > 1e-4


def rows_of(logits, count=DRAWS):
    return torch.from_numpy(logits).float().expand(count, -1)
