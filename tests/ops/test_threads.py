"""The thread pool under the ops: small jobs, several callers, forks, changes of the thread count,
idleness."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from exl3.ops.graph import record
from exl3.ops.norm import rms_norm, rms_norm_reference
from exl3.ops.registry import ops
from exl3.settings import ISA_LEVELS

TOP = len(ISA_LEVELS) - 1


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    """One thread for torch: its pool would compete with ours."""
    before, of_torch = ops().cpu_threads(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(of_torch)
    ops().configure_cpu(before, TOP)


def rows(m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input that the op splits over the threads, and its result."""
    x = torch.randn(m, 2048, generator=torch.Generator().manual_seed(seed))
    return x, rms_norm_reference(x, None, 1e-6)


def close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(np.abs(x.numpy() - y.numpy()).max() < 1e-5)


def check(x: torch.Tensor, want: torch.Tensor, times: int) -> None:
    for _ in range(times):
        assert close(rms_norm(x, None, 1e-6), want)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_many_small_jobs(threads: int) -> None:
    ops().configure_cpu(threads, TOP)
    assert ops().cpu_threads() == threads
    x, want = rows(40, 0)
    graph = record(lambda: [rms_norm(x, None, 1e-6) for _ in range(50)])
    for _ in range(5):
        for y in graph.result:
            y.zero_()
        for y in graph.replay():
            assert close(y, want)


def run_all(calls: list[threading.Thread]) -> None:
    for call in calls:
        call.start()
    for call in calls:
        call.join(timeout=60)
        assert not call.is_alive(), "a call did not return"


def test_several_python_threads_at_once() -> None:
    ops().configure_cpu(3, TOP)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            check(*rows(30 + seed, seed), times=60)
        except BaseException as error:
            failures.append(error)

    run_all([threading.Thread(target=work, args=(seed,)) for seed in range(6)])
    assert not failures


def test_changing_the_thread_count_while_others_call() -> None:
    x, want = rows(64, 1)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                check(x, want, times=1)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=work) for _ in range(2)]
    for caller in callers:
        caller.start()
    for i in range(40):
        ops().configure_cpu(1 + i % 4, TOP)
        check(x, want, times=2)
    stop.set()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive()
    assert not failures


def in_child(x: torch.Tensor, want: torch.Tensor) -> None:
    """Exit code 0 if the op is right. Compared with numpy: torch's own threads do not survive."""
    y = rms_norm(x, None, 1e-6)
    os._exit(0 if close(y, want) else 3)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_then_call_in_the_child(busy: bool) -> None:
    ops().configure_cpu(2, TOP)
    x, want = rows(50, 0)
    check(x, want, times=3)  # the parent's pool runs
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            rms_norm(x, None, 1e-6)

    other = threading.Thread(target=work)
    if busy:  # forks happen while another thread is inside the pool
        other.start()
    children = []
    for _ in range(5):
        child = multiprocessing.get_context("fork").Process(target=in_child, args=(x, want))
        child.start()
        children.append(child)
    for child in children:
        child.join(timeout=30)
    stop.set()
    if busy:
        other.join(timeout=30)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    assert codes == [0] * 5
    check(x, want, times=3)


def test_idle_workers_use_no_time_and_wake_again() -> None:
    ops().configure_cpu(4, TOP)
    x, want = rows(64, 2)
    check(x, want, times=5)
    time.sleep(0.1)
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.05
    check(x, want, times=5)


def test_jobs_spaced_around_the_moment_of_falling_asleep() -> None:
    ops().configure_cpu(2, TOP)
    x, want = rows(20, 3)
    for i in range(150):
        check(x, want, times=1)
        pause = time.perf_counter() + i * 3e-6
        while time.perf_counter() < pause:
            pass
