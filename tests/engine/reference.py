"""One request at a time, with no cache, no streaming and no scheduler."""

from __future__ import annotations

import random

import torch


def run_alone(model, prompt, limit, *, sampler, seed=0, stops=(), negative=None, scale=1.0):
    """(tokens, text, reason) of one request, by the plain rules; guided if there is a `negative`
    prompt."""
    tokenizer = model.tokenizer
    ids, new = list(prompt), []
    draws = random.Random(seed)
    stop_ids = {s for s in stops if isinstance(s, int)}
    strings = [s for s in stops if isinstance(s, str) and s]
    sampler = sampler.clone()
    while len(new) < limit:
        logits = torch.from_numpy(model.reference_logits(ids)).view(1, 1, -1)
        if negative is not None:
            other = torch.from_numpy(model.reference_logits([*negative, *new])).view(1, 1, -1)
            logits = other + scale * (logits - other)
        past = torch.tensor([ids])
        token = int(sampler.forward(logits, past, draws.getrandbits(32), tokenizer))
        ids.append(token)
        if token in stop_ids:
            return new, tokenizer.decode(torch.tensor(new, dtype=torch.long)), "stop_token"
        new.append(token)
        text = tokenizer.decode(torch.tensor(new))
        if len(new) == limit:
            return new, text, "max_new_tokens"
        if text.endswith("\ufffd"):
            continue
        places = [text.find(s) for s in strings if s in text]
        if places:
            return new, text[: min(places)], "stop_string"
    return new, "", "max_new_tokens"
