"""Steps that a device begins before the host has looked at the tokens of the one before: the same
answers, little work in vain."""

from __future__ import annotations

import random

import pytest

from exl3.generator import Generator, Job
from exl3.generator.batch import Runner
from tests.engine.fake import FakeModel
from tests.engine.test_generator import job, prompt, run, text, tokens


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "is_asynchronous", property(lambda self: True))


def answers(generator: Generator, *jobs: Job) -> list[tuple[list[int], str]]:
    return [(tokens(events), text(events)) for events in run(generator, *jobs).values()]


def decodes(generator: Generator) -> int:
    return sum(count == 1 for _, count in generator.model.forwards)


def test_one_job_needs_no_step_more(make, ahead) -> None:
    generator = make(4)
    [(ids, _)] = answers(generator, job(prompt(300), max_new_tokens=20))
    assert len(ids) == 20 and decodes(generator) == 20


def test_a_job_that_ends_by_its_text_costs_one_step(make, ahead) -> None:
    plain = make(4)
    [(_, whole)] = answers(plain, job(prompt(300), max_new_tokens=40))
    cut = whole[9:12]
    generator = make(4)
    [(ids, said)] = answers(generator, job(prompt(300), max_new_tokens=40, stop_conditions=[cut]))
    assert said == whole[: whole.index(cut)]
    assert decodes(generator) == len(ids) + 1


@pytest.mark.parametrize("seed", range(12))
def test_any_jobs(make, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Stops, bans, limits, long prompts that are ingested meanwhile, more jobs than fit, jobs that
    come late, and cancelled ones."""

    def play(generator: Generator) -> list[tuple[list[int], str]]:
        rng = random.Random(seed)
        jobs = []
        for number in range(rng.randint(3, 9)):
            options = {"max_new_tokens": rng.choice([1, 2, 17, 40, 300])}
            if rng.random() < 0.4:
                options["stop_conditions"] = [rng.choice(["ab", "f\n", "c", 2])]
            if rng.random() < 0.4:
                options["banned_strings"] = [rng.choice(["ab", "cde", "f"])]
            if rng.random() < 0.3:
                options["max_rq_tokens"] = rng.choice([8, 100])
            jobs.append(job(prompt(rng.choice([3, 255, 256, 257, 600]), number % 3), **options))
        late = {id(item): rng.choice([0, 0, 3, 9]) for item in jobs}
        doomed = {id(item): rng.randint(2, 30) for item in jobs[2::3]}
        events: dict[int, list] = {id(item): [] for item in jobs}
        for step in range(3000):
            for item in jobs:
                if late[id(item)] == step:
                    generator.enqueue(item)
                if item.new_tokens >= doomed.get(id(item), 1 << 30):
                    generator.cancel(item)
            for event in generator.iterate():
                events[id(event["job"])].append(event)
            generator.check_integrity()
            if step > 9 and not generator.num_remaining_jobs():
                break
        # What a cancelled job said depends on when it was.
        kept = [item for item in jobs if id(item) not in doomed]
        return [(tokens(events[id(item)]), text(events[id(item)])) for item in kept]

    want = play(make(7, max_batch_size=4, max_chunk_size=256))
    monkeypatch.setattr(Runner, "is_asynchronous", property(lambda self: True))
    assert play(make(7, max_batch_size=4, max_chunk_size=256)) == want


def test_a_job_that_comes_later_joins_after_one_step(make, ahead) -> None:
    generator = make(6)
    first, second = job(prompt(100), max_new_tokens=60), job(prompt(100, 1), max_new_tokens=60)
    generator.enqueue(first)
    for _ in range(5):
        generator.iterate()
    before = decodes(generator)
    generator.enqueue(second)
    for _ in range(3):
        generator.iterate()
    assert second.new_tokens >= 1 and decodes(generator) <= before + 4


def test_a_step_that_fails_ahead_is_repeated(make, ahead, caplog) -> None:
    want = answers(make(4), job(prompt(300), max_new_tokens=20))
    generator = make(4)
    item = job(prompt(300), max_new_tokens=20)
    generator.enqueue(item)
    ids = []
    while generator.num_remaining_jobs():
        if item.new_tokens == 3:
            generator.model.fail_next = RuntimeError("no memory for it")
        ids += [t for t in tokens(generator.iterate())]
    assert ids == want[0][0]
    assert [r.message.count("no memory for it") for r in caplog.records] == [1]


def test_a_device_that_is_lost_is_an_error(make, ahead) -> None:
    class Lost(FakeModel):
        lost = False

        def _run(self, *args, **kwargs):
            if self.lost:
                raise RuntimeError("device lost")
            return super()._run(*args, **kwargs)

    model = Lost(letters=b"abcdef \n")
    generator = make(4, model)
    generator.enqueue(job(prompt(300), max_new_tokens=20))
    for _ in range(4):
        generator.iterate()
    model.lost = True
    with pytest.raises(RuntimeError, match="device lost"):
        for _ in range(3):
            generator.iterate()


def test_logits_that_are_told_are_of_their_own_step(make, ahead) -> None:
    want = run(make(4), job(prompt(300), max_new_tokens=6, return_logits=True))
    got = run(make(4), job(prompt(300), max_new_tokens=6, return_logits=True))
    for a, b in zip(*[next(iter(r.values())) for r in (want, got)], strict=True):
        assert ("logits" in a) == ("logits" in b)
        assert "logits" not in a or bool((a["logits"] == b["logits"]).all())
