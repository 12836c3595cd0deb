#!/usr/bin/env python3
"""Convert a small real model to EXL3 and show what comes out: size, speed, quality, an answer.

Run by `make demo`. What exists already is kept: a finished conversion is not repeated, one that
was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from exl3 import ArgmaxSampler, Cache, Config, Generator, Job, Model, Tokenizer, evaluation
from exl3.errors import Exl3Error
from exl3.loader.fetch import fetch_demo_model

SYSTEM = "You answer questions truthfully in one short sentence."
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
INTERRUPTED = 130  # exit status of a conversion that Ctrl-C ended
COLUMNS = ("bits", "stored", "MB", "KL", "same token", "prefill tok/s", "decode tok/s")
TEXT = Path(__file__).with_name("demo_text.txt")


@dataclass(frozen=True, slots=True)
class Target:
    """One conversion: where it goes and how it is done."""

    source: Path
    folder: Path
    bits: float
    head_bits: int
    rows: int
    columns: int

    @property
    def out(self) -> Path:
        return self.folder / f"{self.source.stem.split('.')[0]}-exl3-{self.bits:g}bpw"

    @property
    def work(self) -> Path:
        return self.folder / f"work-{self.bits:g}bpw"

    def options(self) -> dict[str, Any]:
        """What a finished output must say about itself."""
        return {
            "bits": self.bits,
            "head_bits": self.head_bits,
            "cal_rows": self.rows,
            "cal_cols": self.columns,
        }

    def is_finished(self) -> bool:
        """Whether the output exists and was made from this source in this way."""
        report = self.out / "conversion_report.json"
        if not report.is_file():
            return False
        found = json.loads(report.read_text(encoding="utf-8"))
        options = {**found.get("options", {})}
        options["cal_rows"] = found.get("calibration", {}).get("rows")
        options["cal_cols"] = found.get("calibration", {}).get("cols")
        same = all(options.get(name) == value for name, value in self.options().items())
        fingerprint = Config.from_directory(str(self.source)).source.fingerprint()
        return same and found.get("source_fingerprint") == fingerprint

    def convert(self) -> None:
        """Convert, unless that is done; go on with an interrupted job.

        Raises:
            RuntimeError: the conversion failed, and has printed why, or was interrupted.
            SystemExit: it was refused, and has printed why.
        """
        from exl3.conversion.convert_model import run

        if self.is_finished():
            return
        arguments = ["-i", str(self.source), "-o", str(self.out), "-w", str(self.work)]
        arguments += ["-b", f"{self.bits:g}", "-hb", str(self.head_bits)]
        arguments += ["-cr", str(self.rows), "-cc", str(self.columns)]
        started = self.work / "args.json"
        if started.is_file():
            arguments.append("-r" if self._is_same_job(started) else "--restart")
        if status := run(arguments):
            if not started.is_file():  # refused before it began: there is nothing to go on with
                raise SystemExit(status)
            what = "was interrupted" if status == INTERRUPTED else "failed"
            raise RuntimeError(
                f"the conversion {what}; the same command goes on with it. To start anew, delete "
                f"{self.work}"
            )

    def _is_same_job(self, started: Path) -> bool:
        found = json.loads(started.read_text(encoding="utf-8"))
        return all(found.get(name) == value for name, value in self.options().items())


class Loaded:
    """A loaded model with all that goes with it."""

    def __init__(self, source: Path, cache_tokens: int = 2048) -> None:
        self.config = Config.from_directory(str(source))
        self.model = Model.from_config(self.config)
        self.cache = Cache(self.model, cache_tokens)
        self.model.load()
        self.tokenizer = Tokenizer.from_config(self.config)
        self.generator = Generator(self.model, self.cache, self.tokenizer)

    def close(self) -> None:
        self.cache.detach_from_model()
        self.model.unload()

    def ids(self, count: int) -> torch.Tensor:
        """The first tokens of the text that no calibration has seen."""
        return evaluation.text_ids(
            self.tokenizer, TEXT.read_text(encoding="utf-8"), max_tokens=count
        )

    def decode_speed(self, tokens: int = 128) -> float:
        """Tokens per second of one sequence."""
        best = 0.0
        for _ in range(3):
            job = Job(self.ids(32), max_new_tokens=tokens + 1, sampler=ArgmaxSampler())
            self.generator.enqueue(job)
            while job.new_tokens < 1:
                self.generator.iterate()
            start = time.perf_counter()
            while self.generator.num_remaining_jobs():
                self.generator.iterate()
            best = max(best, tokens / (time.perf_counter() - start))
        return best

    def prefill_speed(self, tokens: int = 512) -> float:
        """Tokens per second of a prompt."""
        ids, best = self.ids(tokens), 0.0
        params = {
            "attn_mode": "flash_attn",
            "cache": self.cache,
            "batch_shape": (1, 1024),
            "past_len": 0,
        }
        for _ in range(3):
            start = time.perf_counter()
            self.model.prefill(ids, dict(params))
            best = max(best, ids.shape[-1] / (time.perf_counter() - start))
        return best

    def answer(self, question: str) -> str:
        """Greedy answer in the model's chat format.

        Without the system prompt the unquantised model is as likely to begin in French.
        """
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        ids = self.tokenizer.hf_chat_template(messages)
        job = Job(
            ids,
            max_new_tokens=60,
            sampler=ArgmaxSampler(),
            stop_conditions=self.config.eos_token_id_list,
        )
        self.generator.enqueue(job)
        while self.generator.num_remaining_jobs():
            self.generator.iterate()
        return job.full_completion


def megabytes(folder: Path) -> float:
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) / 1e6


def measure(target: Target, reference: list[torch.Tensor], tokens: int) -> tuple[list[str], str]:
    """A row of the table, and the answer to the question."""
    loaded = Loaded(target.out)
    try:
        bpw, _, _ = loaded.model.get_storage_info()
        ids = loaded.ids(tokens)
        quality = evaluation.kl_divergence(loaded.model, reference, ids)
        row = [
            f"{target.bits:g}",
            f"{bpw:.2f}",
            f"{megabytes(target.out):.1f}",
            f"{quality.mean:.4f}",
            f"{100 * quality.same_top:.1f} %",
            f"{loaded.prefill_speed():.0f}",
            f"{loaded.decode_speed():.0f}",
        ]
        return row, loaded.answer(QUESTION)
    finally:
        loaded.close()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, help="GGUF file or directory; default: fetched")
    add("--out", type=Path, default=Path("demo"), help="folder for everything, default ./demo")
    add("--bits", type=float, nargs="+", default=[4.0], help="average bits per weight, default 4")
    add("--head-bits", type=int, default=6)
    add("--rows", type=int, default=64, help="calibration rows, default 64")
    add("--columns", type=int, default=512, help="tokens per row, default 512")
    add("--tokens", type=int, default=1024, help="tokens of the quality measurement")
    return parser


def show(args: argparse.Namespace, console: Console) -> bool:
    """Everything; True if the answer is right."""
    source = args.model or fetch_demo_model()
    targets = [
        Target(source, args.out, bits, args.head_bits, args.rows, args.columns)
        for bits in args.bits
    ]
    for target in targets:
        target.convert()
    original = Loaded(source)
    ids = original.ids(args.tokens)
    reference = evaluation.all_logits(original.model, ids)
    original.close()
    table = Table(title=f"{source.name} as EXL3, quality over {ids.shape[-1]} tokens")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    answers = []
    for target in targets:
        row, answer = measure(target, reference, args.tokens)
        table.add_row(*row)
        answers.append(answer)
    plain = {"highlight": False, "soft_wrap": True}
    console.print(f"source: {megabytes(source):.1f} MB, {source}", **plain)
    for target in targets:
        console.print(f"output: {megabytes(target.out):.1f} MB, {target.out}", **plain)
    console.print(table)
    console.print(
        "stored: bits per weight with padding and scales, head left out; KL: divergence from the "
        "original in nats; same token: how often both put the same token first",
        style="dim",
    )
    best = max(range(len(targets)), key=lambda i: targets[i].bits)
    console.print(f"[bold]> {QUESTION}[/bold]\n{answers[best]}", highlight=False)
    return EXPECTED in answers[best]


def main(argv: list[str] | None = None) -> int:
    console = Console()
    args = make_parser().parse_args(argv)
    try:
        right = show(args, console)
    except (Exl3Error, OSError, RuntimeError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    if not right:
        console.print(f"error: the answer does not say {EXPECTED}", style="red")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
