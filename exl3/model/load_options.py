"""Arguments of `Model.load` and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError, UnsupportedError

TP_BACKENDS = ("native", "nccl")


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """In the order of the interface page, section 3.1. Sizes are GiB."""

    device: Any = None
    tp_output_device: Any = None
    reserve_per_device: float | Sequence[float] | None = None
    use_per_device: float | Sequence[float] | None = None
    tensor_p: bool = False
    progressbar: bool = False
    max_chunk_size: int = 2048
    max_output_size: int = 32
    max_output_factor: int = 1
    callback: Callable[[int, int], None] | None = None
    generator: bool = True
    tp_dev_limits: dict[str, int] | None = None
    tp_backend: str = "native"
    verbose: bool = False
    max_batch_size: int = 1
    tp_options: dict[str, Any] | None = None
    autosplit_no_forward: bool = False

    def check(self) -> None:
        """Refuse what cannot be done, before any work.

        Raises:
            ConfigError: arguments that exclude each other or have no meaning.
            UnsupportedError: a device that is not there or has no kernels, or tensor parallel.
        """
        if self.tp_backend not in TP_BACKENDS:
            raise ConfigError(f"tp_backend: expected one of {TP_BACKENDS}, got {self.tp_backend!r}")
        split = self.reserve_per_device is not None or self.use_per_device is not None
        if self.reserve_per_device is not None and self.use_per_device is not None:
            raise ConfigError("reserve_per_device and use_per_device exclude each other: give one")
        if self.device is not None and (split or self.tensor_p):
            raise ConfigError(
                "device puts the whole model on one device: it excludes reserve_per_device, "
                "use_per_device and tensor_p"
            )
        if self.tensor_p:
            raise UnsupportedError("tensor_p: this version runs on one device only")
        self.target()

    def target(self) -> torch.device | None:
        """The device that was named; None: to be chosen (`placement.automatic_device`).

        Raises:
            ConfigError: not the name of a device.
            UnsupportedError: it is not there, or exl3 has no kernels for it.
        """
        import exl3_ext

        if self.device is None:
            return None
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"device is {self.device!r}, expected a name such as 'cpu' or 'cuda:0'"
            ) from error
        if device.type == "cpu":
            return torch.device("cpu")
        index = device.index or 0
        if device.type != "cuda" or not exl3_ext.has_cuda() or index >= torch.cuda.device_count():
            raise UnsupportedError(
                f"device {str(self.device)!r}: this machine and build of exl3 have no such device; "
                f"known are 'cpu' and, with a CUDA device and the CUDA library, 'cuda:0'"
            )
        return torch.device("cuda", index)


@contextmanager
def console_progress(wanted: bool, total: int) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of modules done; draws a bar if `wanted`."""
    if not wanted:
        yield lambda done: None
        return
    from ..util.progress import ProgressBar

    with ProgressBar("Loading", total) as bar:
        yield bar.update
