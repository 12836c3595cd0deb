"""Recording a sequence of ops and replaying it without Python between them: launches of exl3 ops
on the CPU, a CUDA graph on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UnsupportedError
from .registry import ops

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Allocation and bookkeeping that computes nothing; views are recognised by their schema.
_HARMLESS = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"})


class _OnlyOurOps(TorchDispatchMode):
    """Refuses every op whose work a replay would leave out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler at the first recording: seconds and 70 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if not (func.namespace == "exl3" or name in _HARMLESS or func.is_view):
            raise UnsupportedError(
                f"{func.name()} ran while a graph was recorded: only exl3 ops and views can be"
            )
        return func(*args, **(kwargs or {}))


class Recording(Protocol[T_co]):
    """What `record` and `capture` return."""

    def replay(self) -> T_co:
        """Run everything again, in order; the same tensors are read and written."""
        ...


class Graph(Generic[T]):
    """Launches recorded by `record`. `result` is what the recorded call returned; a replay writes
    into the same tensors and reads the same inputs."""

    def __init__(self, handle: int, result: T) -> None:
        self._handle = handle
        self.result = result

    def replay(self) -> T:
        """Run every recorded launch again, in order."""
        ops().graph_replay(self._handle)
        return self.result

    def __len__(self) -> int:
        return ops().graph_size(self._handle)

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            torch.ops.exl3.graph_free(handle)


class Arena:
    """Memory on the CPU that recordings share: only one of them may run at a time, and what it
    returns is valid until another does."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        """float32, one-dimensional; None at first."""

    def reserve(self, n_bytes: int) -> Tensor:
        """Memory of at least this size: what is there, or new memory of up to twice the size, which
        earlier recordings do not use."""
        if self.tensor is None or self.tensor.nbytes < n_bytes:
            self.tensor = None
            self.tensor = torch.empty((1 << max(n_bytes - 1, 1).bit_length()) // 4)
        return self.tensor


def record(function: Callable[[], T], arena: Arena | None = None) -> Graph[T]:
    """Run `function` once and record the launches of the exl3 ops it calls on this thread.

    Tensors that the ops read and wrote are kept alive by the graph. Inputs that change between
    replays must be written in place.

    Args:
        arena: what results and workspaces of the ops are made in; those that are not needed at the
            same time share memory. `function` then runs twice, the first time to measure, and must
            return a tensor, or lists or tuples of them.
    Raises:
        UnsupportedError: the function ran an op that is neither of exl3 nor a view.
    """
    memory = None
    if arena is not None:
        memory = arena.reserve(_measure(function))
    namespace = ops()
    namespace.graph_begin(memory)
    kept = False
    try:
        with _OnlyOurOps():
            result = function()
        kept = True
    finally:
        handle = namespace.graph_end(kept)
    return Graph(handle, result)


def _measure(function: Callable[[], object]) -> int:
    """Bytes of an arena for what `function` launches."""
    namespace = ops()
    namespace.graph_begin(None)
    results: list[Tensor] = []
    try:
        with _OnlyOurOps():
            results += _tensors(function())
    except BaseException:
        namespace.graph_end(False)
        raise
    return namespace.graph_measure(results)


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, list | tuple), "record with an arena takes tensors only"
    return [tensor for part in result for tensor in _tensors(part)]


class CudaGraph(Generic[T]):
    """Work captured by `capture`. The result is valid until the next replay of any graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T) -> None:
        self._graph = graph
        self.result = result

    def replay(self) -> T:
        """Queue the captured work again on the current stream."""
        self._graph.replay()
        return self.result

    def pool(self) -> Any:
        """Handle of the memory that it was captured with; no longer valid than some such graph."""
        return self._graph.pool()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _captured(device: torch.device) -> WeakSet[CudaGraph[Any]]:
    """The graphs of a device that are in use. They share memory, which goes with the last."""
    return WeakSet()


def capture(function: Callable[[], T], device: torch.device) -> CudaGraph[T]:
    """Run `function` on a CUDA device and capture its work as a graph.

    It runs once before, so that kernels are loaded and workspaces exist. It may call any op that
    does not wait for the device; inputs that change between replays must be written in place.
    Graphs of one device share memory and must not run at the same time.
    """
    ops()
    stream = _capture_stream(device)
    other = next(iter(_captured(device)), None)  # whose memory is shared: it must live till the end
    with torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = None if other is None else other.pool()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = function()
    captured = CudaGraph(graph, result)
    _captured(device).add(captured)
    return captured


class GraphTimer:
    """Times work on a CUDA device as captured graphs: launches from Python do not count. Its memory
    goes with it."""

    def __init__(self, device: torch.device) -> None:
        ops()
        self.device = device
        self._first: torch.cuda.CUDAGraph | None = None  # holds the memory that all share

    def seconds(self, function: Callable[[], object], replays: int = 4) -> float:
        """Of the fastest replay of what `function` launches; see `capture`."""
        stream, graph = _capture_stream(self.device), torch.cuda.CUDAGraph()
        found = []
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            function()
            # Without the pause that `torch.cuda.graph` makes to collect memory.
            pool = None if self._first is None else self._first.pool()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
            self._first = self._first or graph
            for _ in range(replays):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) * 1e-3)
        return min(found)
