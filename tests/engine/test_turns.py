"""Prompts share the work of a step: running jobs go on, and no prompt waits for ever."""

from __future__ import annotations

from tests.engine.test_generator import expect_alone, job, prompt

CHUNK = 512


def ingested(generator, before: int) -> int:
    """Prompt tokens of the passes since then; decode steps have one token a row."""
    return sum(count for _, count in generator.model.forwards[before:] if count > 1)


def test_a_step_ingests_one_chunk_in_all(make) -> None:
    generator = make(64, max_chunk_size=CHUNK)
    running = job(prompt(20), max_new_tokens=60)
    generator.enqueue(running)
    generator.iterate()
    jobs = [job(prompt(1500 + i, i), max_new_tokens=3) for i in range(5)]
    generator.enqueue(jobs)
    events, steps = [], 0
    while generator.num_remaining_jobs():
        before, said = len(generator.model.forwards), running.new_tokens
        events += generator.iterate()
        generator.check_integrity()
        assert ingested(generator, before) <= CHUNK
        assert running.is_finished or running.new_tokens == said + 1
        steps += generator.num_active_jobs() > 1
    assert 15 <= steps <= 25  # 7500 tokens, none of the steps half empty
    for item in jobs:
        ids = item.sequences[0].input_ids.torch()[0, : item.prompt_tokens].tolist()
        mine = [event for event in events if event["job"] is item]
        expect_alone(generator, item, mine, ids, 3)


def test_short_prompts_share_a_step_and_pass_a_long_one(make) -> None:
    generator = make(32, max_chunk_size=CHUNK)
    long = job(prompt(4000), max_new_tokens=2)
    generator.enqueue(long)
    generator.iterate()
    short = [job(prompt(101, i), max_new_tokens=5) for i in range(1, 5)]
    generator.enqueue(short)
    generator.iterate()
    generator.iterate()
    assert all(item.new_tokens for item in short)
    assert 2 * CHUNK <= long.sequence.stored < 3 * CHUNK


def test_a_long_prompt_does_not_starve(make) -> None:
    """Every step brings a new prompt that would fill it; every turn comes all the same."""
    generator = make(64, max_chunk_size=256)
    long = job(prompt(2000), max_new_tokens=1)
    generator.enqueue(long)
    for step in range(300):  # at most 28 others hold pages, and it has eight turns
        generator.enqueue(job([3 + step // 100, 3 + step % 100, *prompt(255)], max_new_tokens=1))
        generator.iterate()
        if long.is_finished:
            break
    assert long.is_finished


def test_a_prompt_that_needs_no_work_waits_for_none(make) -> None:
    generator = make(32, max_chunk_size=256)
    known = job(prompt(257, 3), max_new_tokens=1)
    generator.enqueue(known)
    while not known.is_finished:
        generator.iterate()
    again = job(prompt(257, 3), max_new_tokens=2)
    generator.enqueue([job(prompt(1500), max_new_tokens=1), again])
    generator.iterate()
    assert again.new_tokens == 1


def test_a_small_remainder_goes_to_who_can_use_it(make) -> None:
    """412 tokens are left after the first; the second takes a page, the third what is left."""
    generator = make(32, max_chunk_size=CHUNK)
    jobs = [job(prompt(length, i), max_new_tokens=1) for i, length in enumerate((101, 600, 120))]
    generator.enqueue(jobs)
    before = len(generator.model.forwards)
    generator.iterate()
    assert [item.sequence.stored for item in jobs[1:2]] == [256]
    assert jobs[0].is_finished and jobs[2].is_finished
    assert ingested(generator, before) == 100 + 256 + 119
