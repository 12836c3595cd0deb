"""The steps of section 7 of the interface, dense and in float64, straight from their definitions.

A distribution is an array of probabilities over the whole vocabulary; cut tokens have 0.
"""

from __future__ import annotations

import numpy as np


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    p = np.exp(logits - logits[np.isfinite(logits)].max())
    return p / p.sum()


def keep(p, mask):
    p = np.where(mask, p, 0.0)
    return p / p.sum()


def top_k(p, k):
    return keep(p, p >= np.sort(p)[-k]) if k < p.size else p


def top_p(p, limit):
    order = np.argsort(-p, kind="stable")
    sums = np.cumsum(p[order])
    mask = np.zeros(p.size, bool)
    mask[order[sums <= limit + 1e-6]] = True
    mask[order[0]] = True
    return keep(p, mask)


def min_p(p, limit):
    return keep(p, p >= limit * p.max() * (1 - 1e-6))


def temperature(p, value):
    with np.errstate(divide="ignore"):
        return softmax(np.log(p) / value)


def xtc(p, probability, threshold, protected=()):
    high = [i for i in range(p.size) if p[i] >= threshold and i not in protected]
    if len(high) < 2:
        return p
    least = min(high, key=lambda i: p[i])
    out = [i for i in high if i != least]
    without = p.copy()
    without[out] = 0
    without /= without.sum()
    return (1 - probability) * p + probability * without


def factors(past, sustain, decay):
    """(token, factor) of every past occurrence, newest first."""
    for d, token in enumerate(reversed(past), 1):
        if d <= sustain:
            yield token, 1.0
        elif d < sustain + decay:
            yield token, 1 - (d - sustain) / decay


def rep_p(logits, past, penalty, sustain, decay):
    out = np.array(logits, np.float64)
    for token in set(past):
        f = max((f for t, f in factors(past, sustain, decay) if t == token), default=0.0)
        if token < out.size and np.isfinite(out[token]):
            w = out[token] / penalty if out[token] > 0 else out[token] * penalty
            out[token] = (1 - f) * out[token] + f * w
    return out


def pres_freq_p(logits, past, pres, freq, sustain, decay):
    out = np.array(logits, np.float64)
    for token in set(past):
        all_f = [f for t, f in factors(past, sustain, decay) if t == token]
        if token < out.size and all_f:
            out[token] -= freq * sum(all_f) + pres * max(all_f)
    return out
