#!/usr/bin/env python3
"""Chat with a model in the console: `chat.py -m DIRECTORY`. /h in the chat lists commands."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chat_commands import CommandError, run_command
from chat_input import Keyboard, stop_watch
from chat_modes import MODES, mode_of
from chat_session import Session
from chat_tools import find_svg
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from exl3 import Generator, Job, model_init
from exl3.errors import ConfigError, Exl3Error
from exl3.model.lora import LoRA
from exl3.tokenizer.template import read_templates

GIB = 1024**3


class Chat:
    """The loop of prompts and answers."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        self.keyboard = Keyboard(console, plain=args.basic_console)
        found = model_init.init(args, quiet=bool(args.prompt), progress=not args.basic_console)
        self.model, self.config, self.cache, self.tokenizer, *draft = found
        self.drafter = {"draft_model": draft[0], "draft_cache": draft[2]}
        self.generator = self.make_generator()
        self.counted: Job | None = None  # whose reasoning has reached its budget
        for directory in args.lora or []:
            LoRA.from_directory(self.model, directory)
        mode = mode_of(args.mode or "auto", args.user_name, args.bot_name)
        if mode.turn is None and "default" not in read_templates(
            self.config.directory, self.tokenizer.tokenizer_config_dict
        ):
            raise ConfigError(
                f"{self.config.directory} has no chat template: it is no chat model, or its"
                " template is not with it; try -mode raw, or another of those that -modes lists"
            )
        self.session = Session(
            self.tokenizer,
            mode,
            self.cache.max_num_tokens,
            min(args.max_response_tokens, self.cache.max_num_tokens // 2),
            mode.default_system if args.system_prompt is None else args.system_prompt,
            args.think,
            args.negative_system_prompt,
        )

    def make_generator(self) -> Generator:
        """A generator with an empty queue and an empty cache."""
        args = self.args
        return Generator(
            self.model,
            self.cache,
            self.tokenizer,
            **self.drafter,
            num_draft_tokens=args.num_draft_tokens,
            ngram_match_min=args.ngram_match_min,
            dynamic_draft_tokens=args.dynamic_draft,
            dynamic_draft_skip_ema=args.draft_skip_ema,
            cpu_cache_size=int(args.cpu_cache_size * GIB),
            recurrent_cache_size=int(args.recurrent_cache_size * GIB),
            show_visualizer=args.visualize_cache,
        )

    def say(self, line: str, style: str = "dim") -> None:
        """A line of ours, not of the model."""
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    # Answers

    def job(self, prompts: list[Tensor], **more: Any) -> Job:
        args, mode = self.args, self.session.mode
        banned = list(self.session.banned)
        if args.no_think and mode.think:
            banned.append(mode.think[0].strip())
        return Job(
            prompts,
            max_new_tokens=self.session.max_response,
            sampler=model_init.get_arg_sampler(args, self.tokenizer),
            stop_conditions=self.session.stop_conditions(self.config),
            banned_strings=banned,
            stop_on_loop=(args.loop_window, args.loop_min_reps) if args.loop_window else None,
            return_top_tokens=args.probs,
            cfg_scale=args.cfg_scale,
            **more,
        )

    def answer(self, prompt: str) -> str | None:
        """One turn; the answer, or None if the prompt does not fit."""
        self.session.turns.append((prompt, ""))
        return self.go_on()

    def go_on(self) -> str | None:
        """Complete the answer of the last turn."""
        prompts, dropped = self.session.fit()
        if dropped:
            self.say(f" -- the {dropped} oldest turns no longer fit and were forgotten")
        if prompts is None:
            self.say(" !! this prompt does not fit the cache and was dropped", "red")
            return None
        user, begun = self.session.turns[-1]
        if begun:
            self.console.print(begun, end="", markup=False, highlight=False, soft_wrap=True)
        job = self.job(prompts, token_healing=bool(begun))
        said = begun + self.stream(job)
        self.session.turns[-1] = (user, said)
        if self.args.amnesia:
            self.session.turns.clear()
        return said

    def stream(self, job: Job) -> str:
        """Show an answer as it comes; Ctrl-C or Escape ends it."""
        text, last, started = "", None, time.perf_counter()
        for event in self.events(job):
            self.show_probs(event)
            text += event.get("text", "")
            self.write(event.get("text", ""))
            self.keep_to_budget(job)
            last = event if event["eos"] else last
        self.write("\n")
        if last is not None:
            self.tell(last)
        elif self.args.debug:
            self.say(f"stopped after {time.perf_counter() - started:.2f} s")
        return text

    def events(self, *jobs: Job) -> Iterator[dict[str, Any]]:
        """The events of these jobs, until they end or the user stops them."""
        self.generator.enqueue(list(jobs))
        try:
            with stop_watch() as stopped:
                while self.generator.num_remaining_jobs() and not stopped():
                    yield from self.generator.iterate()
        except KeyboardInterrupt:  # in the middle of a step: nothing of this generator is sure
            self.generator = self.make_generator()
            self.say(" (broken off)")
        finally:
            if self.generator.num_remaining_jobs():
                self.generator.clear_queue()
                self.say(" (stopped)")

    def write(self, text: str) -> None:
        if text and not self.args.probs:
            self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            self.console.file.flush()

    def tell(self, last: dict[str, Any]) -> None:
        """What there is to say after an answer."""
        if "error" in last or "filter_error" in last:
            self.say(f" !! {last.get('error') or last['filter_error']}", "red")
        if last["eos_reason"] in ("max_new_tokens", "loop_detected"):
            self.say(f" -- ended by {last['eos_reason']}")
        if self.args.show_tps:
            read = last["prompt_tokens"] - last["cached_tokens"]
            speed = last["new_tokens"] / max(last["time_generate"], 1e-9)
            self.say(
                f" -- prompt {last['prompt_tokens']} tokens, {last['cached_tokens']} cached, "
                f"{read / max(last['time_prefill'], 1e-9):.1f} tokens/s; "
                f"answer {last['new_tokens']} tokens, {speed:.1f} tokens/s"
            )
            right = last.get("accepted_draft_tokens", 0)
            if drafted := right + last.get("rejected_draft_tokens", 0):
                self.say(f" -- {right} of {drafted} drafted tokens were right")

    def show_probs(self, event: dict[str, Any]) -> None:
        """One line per token with the likeliest choices."""
        if "top_k_tokens" not in event:
            return
        pieces = self.tokenizer.get_id_to_piece_list(True)
        for row, token in enumerate(event["token_ids"][0].tolist()):
            ids, probs = event["top_k_tokens"][0, row], event["top_k_probs"][0, row]
            choices = "  ".join(
                f"{pieces[i]!r} {p:.3f}" for i, p in zip(ids.tolist(), probs.tolist(), strict=True)
            )
            self.console.print(f"[bold]{escape(repr(pieces[token]))}[/bold]  {escape(choices)}")

    def keep_to_budget(self, job: Job) -> None:
        """End the reasoning after so many tokens."""
        tags, budget = self.session.mode.think, self.args.think_budget
        if not (budget and tags and self.session.think) or job.new_tokens < budget:
            return
        if job is self.counted:  # once: a step may bring several tokens
            return
        self.counted = job
        if tags[1] not in job.full_completion:
            close = self.tokenizer.encode(tags[1] + "\n\n", encode_special_tokens=True)
            job.constrain_output_now(close)

    def many(self, count: int, prompt: str) -> None:
        """Several answers to one prompt, in one batch; the conversation stays as it is."""
        self.session.turns.append((prompt, ""))
        prompts, _ = self.session.fit()
        if prompts is None:
            self.say(" !! this prompt does not fit the cache", "red")
            return
        self.session.turns.pop()
        jobs = [self.job(prompts, identifier=i, seed=None) for i in range(count)]
        for event in self.events(*jobs):
            if event["eos"]:
                self.say(f"--- {event['identifier'] + 1}", "bold")
                self.say(event["full_completion"], "none")

    # Input

    def loop(self) -> None:
        """Until /x or the end of input."""
        while True:
            try:
                line = self.keyboard.ask(multiline=self.args.multiline).strip()
            except KeyboardInterrupt:
                self.console.print()
                continue
            except EOFError:
                return
            try:
                prompt = run_command(self, line) if line.startswith("/") else line
                if prompt:
                    self.answer(prompt)
            except EOFError:
                return
            except KeyboardInterrupt:
                self.say(" (stopped)")
            except (CommandError, OSError, ValueError, Exl3Error) as error:
                self.say(f" !! {error}", "red")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    model_init.add_args(
        parser, default_cache_size=32768, add_sampling_args=True, add_draft_model_args=True
    )
    add = parser.add_argument
    flag: dict[str, Any] = {"action": "store_true"}
    add("-mode", "--mode", choices=MODES, help="prompt mode, default auto")
    add("-modes", "--modes", **flag, help="list prompt modes and exit")
    add("-un", "--user_name", default="User", help="in mode raw")
    add("-bn", "--bot_name", default="Assistant", help="in mode raw")
    add("-sp", "--system_prompt", help="default: that of the mode")
    add("-nsp", "--negative_system_prompt", help="lead away from answers to this (guidance)")
    add("-cfg", "--cfg_scale", type=float, help="strength of the guidance, default 1.5")
    add("-mli", "--multiline", **flag, help="multi-line input, Alt-Enter sends")
    add("-basic", "--basic_console", **flag, help="plain output")
    add("-maxr", "--max_response_tokens", type=int, default=5000, help="at most half the cache")
    add("-think", "--think", **flag, help="let the model reason first")
    add("-no_think", "--no_think", **flag, help="ban the mode's think tag")
    add("-think_budget", "--think_budget", type=int, default=0, help="tokens of reasoning, 0: any")
    add("-amnesia", "--amnesia", **flag, help="forget after each turn")
    add("-tps", "--show_tps", **flag, help="speed line after each answer")
    add("-probs", "--probs", type=int, default=0, help="show the n most likely tokens")
    add("-prompt", "--prompt", help="answer this and exit")
    add("-save", "--save", help="write the answer to a file")
    add("-save_svg", "--save_svg", help="write the SVG of the answer to a file")
    add("-lora", "--lora", nargs="+", metavar="DIR", help="adapters (PEFT directories) to apply")
    add("-lw", "--loop_window", type=int, default=300, help="stop on loops, 0: do not")
    add("-lmr", "--loop_min_reps", type=int, default=3)
    add("-ups", "--updates-per-second", type=int, default=30, help="accepted, no effect")
    add("-dbg", "--debug", **flag)
    add("-vis", "--visualize_cache", **flag, help="refused: there is no such window")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "-modes" in argv or "--modes" in argv:
        for name, mode in MODES.items():
            print(f"{name:<10} {mode.family}")
        return 0
    args = make_parser().parse_args(argv)
    if args.think and args.no_think:
        print("error: -think and -no_think exclude each other", file=sys.stderr)
        return 2
    if args.cfg_scale is None and args.negative_system_prompt is not None:
        args.cfg_scale = 1.5
    if args.cfg_scale not in (None, 1.0) and args.negative_system_prompt is None:
        print("error: -cfg needs -nsp, what to lead away from", file=sys.stderr)
        return 2
    console = Console(
        no_color=args.basic_console or None,
        force_terminal=False if args.basic_console else None,
    )
    try:
        chat = Chat(args, console)
        said = None
        if args.prompt is None:
            chat.loop()
            said = chat.session.turns[-1][1] if chat.session.turns else None
        else:
            said = chat.answer(args.prompt)
        if args.save and said is not None:
            Path(args.save).write_text(said, encoding="utf-8")
        if args.save_svg:
            svg = find_svg(said or "")
            if svg is None:
                raise ConfigError("-save_svg: the answer has no <svg>")
            Path(args.save_svg).write_text(svg, encoding="utf-8")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (Exl3Error, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if args.prompt is None or said is not None else 1


if __name__ == "__main__":
    sys.exit(main())
