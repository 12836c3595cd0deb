"""Running the command lines beside `convert.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ..errors import ConfigError, Exl3Error
from .arguments import Parser
from .convert_model import one_line


def run_command(parser: Parser, prepare: Any, main: Any, argv: Sequence[str] | None) -> int:
    """Parse, prepare and do the work of a command, with an exit status."""
    console = Console(stderr=True, soft_wrap=True)
    verbose = False
    try:
        args = parser.parse_args(argv)
        verbose = bool(args.verbose)
        in_args, job_state, ok, error = prepare(args)
        if not ok:
            raise ConfigError(error or "cannot start")
        main(in_args, job_state, console)
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written", highlight=False)
        return 130
    except (Exl3Error, OSError, ImportError, MemoryError) as error:
        if verbose:
            console.print_exception()
        console.print(f"error: {one_line(error)}", style="red", highlight=False, markup=False)
        return 1
    return 0
