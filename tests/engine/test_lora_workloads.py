"""Random workloads with adapters, on a model whose every slot depends on them: a page that one
request takes from another with other adapters changes its output."""

from __future__ import annotations

from dataclasses import dataclass
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3.generator import Generator, Job
from exl3.generator.sampler import ArgmaxSampler
from exl3.model.adapters import Adapter, AdapterSet
from tests.engine.fake import PAGE_BYTES, FakeCache, FakeModel, drafting
from tests.engine.reference import run_alone
from tests.engine.test_generator import job, tokens

NAMES = "abc"


def first_value(digests: set[bytes]) -> int:
    return 1 + sum(int.from_bytes(digest, "little") for digest in digests)


class AdaptedModel(FakeModel):
    """A model with three adapters."""

    def __init__(self) -> None:
        super().__init__(letters=b"abc \n", eos_bias=1.0)
        self.adapters = AdapterSet()
        self.loras = {}
        for name in NAMES:
            self.load(name)

    def load(self, name: str) -> None:
        """Load an adapter, again if it was unloaded: an object of its own, the same contents."""
        lora = SimpleNamespace(name=name, adapter=Adapter(name, {}, name.encode() * 4))
        self.loras[name] = lora
        self.adapters.loaded.append(lora)

    def unload(self, name: str) -> None:
        self.adapters.loaded.remove(self.loras.pop(name))

    def first_value(self, params, row: int) -> int:
        chosen = params["loras"][row]
        assert all(isinstance(adapter, Adapter) for adapter in chosen)
        return first_value({adapter.digest for adapter in chosen})


class Alone:
    """What `run_alone` needs, with some adapters."""

    def __init__(self, model: AdaptedModel, names: str) -> None:
        self.model, self.tokenizer = model, model.tokenizer
        self.first = first_value({name.encode() * 4 for name in names})

    def reference_logits(self, ids) -> np.ndarray:
        return self.model.logits_of(np.array(self.model.values(self.first, ids), np.uint64))


@dataclass(frozen=True)
class Request:
    """One request; `names` None: whatever is loaded when it is enqueued."""

    length: int
    limit: int
    step: int | None
    names: str | None
    start: int
    cancel: int | None

    def prompt(self) -> list[int]:
        return [3 + 97 + i * i % 5 for i in range(self.length)]


REQUESTS = st.builds(
    Request,
    length=st.sampled_from([1, 100, 255, 256, 257, 300, 513]),
    limit=st.sampled_from([1, 5, 40, 270]),
    step=st.sampled_from([None, None, 1, 256]),
    names=st.sampled_from([None, "", "", "a", "a", "b", "ab", "ba", "abc"]),
    start=st.sampled_from([0, 0, 2, 10]),
    cancel=st.sampled_from([None, None, None, 1, 12]),
)
# At which step which adapter is unloaded and loaded again.
SWAPS = st.dictionaries(st.integers(0, 30), st.sampled_from(NAMES), max_size=4)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    requests=st.lists(REQUESTS, min_size=2, max_size=8),
    swaps=SWAPS,
    pages=st.integers(4, 7),
    host=st.sampled_from([0, 2, 12]),
    files=st.sampled_from([0, 100]),
    kind=st.sampled_from(["none", "ngram", "model"]),
)
def test_any_workload(
    requests: list[Request],
    swaps: dict[int, str],
    pages: int,
    host: int,
    files: int,
    kind: str,
) -> None:
    page_bytes = PAGE_BYTES * (2 if kind == "model" else 1)
    requests = [r for r in requests if r.length + r.limit - 1 <= pages * 256]
    with TemporaryDirectory() as folder:
        for _ in range(2):  # a new process: pages on disk are found by what adapters contain
            model = AdaptedModel()
            generator = Generator(
                model,
                FakeCache(model, pages * 256),
                model.tokenizer,
                cpu_cache_size=host * page_bytes,
                disk_cache_dir=folder if files else None,
                disk_cache_size=files * (page_bytes + 2200),
                **drafting(model, pages, kind),
            )
            play(generator, requests, swaps)
            generator.close()


def play(generator: Generator, requests: list[Request], swaps: dict[int, str]) -> None:
    model = generator.model
    jobs: dict[int, Job] = {}
    names: dict[int, str] = {}
    events: dict[int, list[dict]] = {i: [] for i in range(len(requests))}
    step = 0
    while len(jobs) < len(requests) or generator.num_remaining_jobs():
        if step in swaps:
            model.unload(swaps[step])
        for i, request in enumerate(requests):
            if i not in jobs and request.start <= step:
                asked = request.names
                if asked is not None:
                    asked = "".join(name for name in asked if name in model.loras)
                names[i] = "".join(model.loras) if asked is None else asked
                loras = None if asked is None else [model.loras[name] for name in asked]
                jobs[i] = job(
                    request.prompt(),
                    max_new_tokens=request.limit,
                    max_rq_tokens=request.step,
                    identifier=i,
                    loras=loras,
                )
                generator.enqueue(jobs[i])
            if request.cancel is not None and step == request.start + request.cancel:
                generator.cancel(jobs[i])
        for event in generator.iterate():
            events[event["identifier"]].append(event)
        generator.check_integrity()
        if step in swaps:
            model.load(swaps[step])
        step += 1
        assert step < 5000
    for i, request in enumerate(requests):
        alone = Alone(model, names[i])
        want = run_alone(alone, request.prompt(), request.limit, sampler=ArgmaxSampler())[0]
        got = tokens(events[i])
        ended = bool(events[i]) and events[i][-1]["eos"]
        assert ended or request.cancel is not None
        assert got == (want if ended else want[: len(got)])
