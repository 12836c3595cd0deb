"""The steps beyond the interface page in plain torch, float64, straight from their definitions.

A distribution is a tensor of probabilities over the whole vocabulary; cut tokens have 0.
"""

from __future__ import annotations

import math

import torch


def softmax(logits):
    return torch.as_tensor(logits, dtype=torch.float64).flatten().softmax(-1)


def keep(p, mask):
    p = torch.where(mask, p, 0.0)
    return p / p.sum()


def entropy(p):
    return -torch.xlogy(p, p).sum()


def typical_p(p, limit):
    shift = (-p.log() - entropy(p)).abs()
    mask, mass = torch.zeros(p.numel(), dtype=torch.bool), 0.0
    for i in shift.argsort(stable=True).tolist():
        if p[i] == 0:
            continue
        mask[i] = True
        mass += float(p[i])
        if mass >= limit - 1e-6:
            break
    return keep(p, mask)


def top_a(p, value):
    return keep(p, p >= value * p.max() ** 2 * (1 - 1e-6))


def top_n_sigma(logits, n):
    logits = torch.as_tensor(logits, dtype=torch.float64).flatten()
    sigma = logits[logits > -math.inf].std(correction=0)
    return keep(logits.softmax(-1), logits >= logits.max() - n * sigma - 1e-6)


def dyna_temp(p, low, high, exponent):
    count = int((p > 0).sum())
    if count < 2:
        return p
    t = low + (high - low) * float(entropy(p) / math.log(count)) ** exponent
    if t == 0:
        return torch.nn.functional.one_hot(p.argmax(), p.numel()).double()
    return (p.log() / t).softmax(-1)


def smoothing(logits, factor, curve):
    logits = torch.as_tensor(logits, dtype=torch.float64).flatten()
    d = logits - logits.max()
    k, s = (3 - curve) / 2, (curve - 1) / 2
    bent = -k * factor * d**2 + s * factor * d**3 + logits.max()
    return torch.where(logits > -math.inf, bent, logits).softmax(-1)


def dry(past, multiplier, base, allowed, reach, breakers):
    """Token -> penalty: every earlier place is tried, every length counted from 1."""
    past = past[-reach:] if reach else past
    out: dict[int, float] = {}
    for i in range(len(past) - 1):
        if past[i + 1] in breakers:
            continue
        n = 0
        while n <= i and past[i - n] == past[-1 - n] and past[i - n] not in breakers:
            n += 1
        if n >= max(allowed, 1):
            penalty = multiplier * base ** (n - allowed)
            out[past[i + 1]] = max(out.get(past[i + 1], 0.0), penalty)
    return out
