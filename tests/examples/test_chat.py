"""`chat.py` without a terminal: commands, keys, interruptions."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODEL = ROOT / "tests" / "fixtures" / "golden" / "tiny_llama_exl3"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: importlib.import_module(name)


def chat(example, *arguments: str) -> int:
    base = ["-m", str(MODEL), "-mode", "raw", "-cs", "1024", "-maxr", "6", "-basic"]
    return example("chat").main([*base, *arguments])


def talk(example, monkeypatch, *lines: str, arguments: tuple[str, ...] = ()) -> int:
    """A chat in which the user enters these lines."""
    from rich.console import Console

    queue = iter([*lines, "/x"])
    monkeypatch.setattr(Console, "input", lambda self, *args, **kwargs: next(queue))
    return chat(example, *arguments)


def answers(example, monkeypatch, text: str) -> None:
    """Every answer is this text."""
    monkeypatch.setattr(example("chat").Chat, "stream", lambda self, job: text)


PROGRAM = """Here:
```python
import os
print(6 * 7, sorted(os.listdir(".")), os.environ.get("SECRET"))
```
"""


def test_chat_python_runs_after_a_yes_only(example, capsys, monkeypatch) -> None:
    answers(example, monkeypatch, PROGRAM)
    monkeypatch.setenv("SECRET", "42-secret")
    assert talk(example, monkeypatch, "/python", "Hi", "/python", "n", "/python", "yes") == 0
    said = capsys.readouterr().out
    assert "no Python code block" in said and said.count("not run") == 1
    assert said.count("42 ['program.py'] None") == 1 and "42-secret" not in said


@pytest.mark.parametrize("tool", ["bwrap", "unshare", None])
def test_sandbox(example, tool: str | None) -> None:
    sandbox = example("chat_tools").Sandbox()
    if tool is not None and not sandbox._works(tool):
        pytest.skip(f"{tool} does not work here")
    sandbox.tool = tool
    assert sandbox.run("print('ä')").strip() == "ä"
    assert "exit status 3" in sandbox.run("raise SystemExit(3)")
    assert "ZeroDivisionError" in sandbox.run("1 / 0")
    assert "stopped after 1 s" in sandbox.run("print('a', flush=True)\nwhile True: pass", 1)
    assert ("no network" in sandbox.protection) is (tool is not None)
    if tool is not None:
        code = "import socket\ns = socket.socket()\ns.settimeout(3)\ns.connect(('1.1.1.1', 53))"
        assert "nreachable" in sandbox.run(code)


def test_chat_svg(example, capsys, monkeypatch, tmp_path: Path) -> None:
    svg = '<svg viewBox="0 0 9 9"><circle r="3"/></svg>'
    answers(example, monkeypatch, f"No: <svg>1</svg>\n```svg\n{svg}\n```")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert talk(example, monkeypatch, "/svg", "/cat", "/svg") == 0
    assert "has no <svg>" in capsys.readouterr().out and len(opened) == 1
    shown = Path(opened[0].removeprefix("file://"))
    assert shown.read_text() == svg
    shown.unlink()
    file = tmp_path / "a.svg"
    assert chat(example, "-prompt", "A cat", "-save_svg", str(file)) == 0
    assert file.read_text() == svg
    answers(example, monkeypatch, "I cannot draw.")
    assert chat(example, "-prompt", "A cat", "-save_svg", str(file)) == 1
    assert "has no <svg>" in capsys.readouterr().err


def test_chat_needle_and_questions(example, capsys, monkeypatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def note(self, prompt: str) -> None:
        seen.append(prompt)

    monkeypatch.setattr(example("chat").Chat, "answer", note)
    files = {"a.txt": "One?\n\n", "b.jsonl": '{"question": "Two?"}\n', "c.json": '["Three?"]'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    lines = [f"/b {tmp_path / name}" for name in files]
    assert talk(example, monkeypatch, "/nihs 300", "/nihs", *lines, "/b", "/b nowhere") == 0
    said = capsys.readouterr().out
    tokens = int(said.split(" tokens; the answer is ")[0].split()[-1])
    number = said.split("the answer is ")[1].split()[0]
    assert 250 < tokens < 450 and number in seen[0]
    assert seen[1:4] == ["One?", "Two?", "Three?"]
    assert seen[4] in example("chat_tools").QUESTIONS
    assert "/nihs needs a whole number" in said and "nowhere" in said


@pytest.mark.parametrize("presses", [1, 2])
def test_chat_interrupted(example, capsys, monkeypatch, presses: int) -> None:
    """One Ctrl-C ends the answer after the step that runs, a second at once; the chat goes on."""
    from exl3 import Generator

    step, calls = Generator.iterate, []

    def iterate(self):
        calls.append(self)
        if len(calls) == 3:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Generator, "iterate", iterate)
    before = signal.getsignal(signal.SIGINT)
    assert talk(example, monkeypatch, "One", "/t", "Two", "/n 2 Three", "/gm") == 0
    said = capsys.readouterr().out
    assert said.count("(stopped)" if presses == 1 else "(broken off)") == 1
    assert "--- 2" in said and "free: 4" in said
    assert (calls[3] is calls[2]) is (presses == 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_interrupted_between_steps(example, capsys, monkeypatch) -> None:
    """While text is shown: nothing of the job stays in the queue."""
    module = example("chat")
    write, calls = module.Chat.write, []

    def show(self, text: str) -> None:
        calls.append(self.generator)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        write(self, text)

    monkeypatch.setattr(module.Chat, "write", show)
    assert talk(example, monkeypatch, "One", "/gm", "Two") == 0
    assert "(stopped)" in capsys.readouterr().out
    assert calls[-1].num_remaining_jobs() == 0 and calls[-1] is calls[0]


def test_chat_interrupted_while_loading(example, capsys, monkeypatch) -> None:
    def init(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("exl3.model_init.init", init)
    assert chat(example, "-prompt", "Hello") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a Unix terminal")
def test_escape_is_told_from_other_keys(example) -> None:
    import termios

    master, slave = os.openpty()
    before = termios.tcgetattr(slave)
    with example("chat_input").stop_watch(slave) as stopped:
        assert not stopped()
        for keys in (b"\x1b[A", b"abc"):
            os.write(master, keys)
            assert not stopped()
        os.write(master, b"\x1b")
        assert stopped() and not stopped()
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_alt_enter_sends(example) -> None:
    """Enter makes a line, Alt-Enter (Escape, Enter) sends them."""
    toolkit = pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput
    from rich.console import Console

    keyboard = example("chat_input").Keyboard(Console(), plain=True)
    assert keyboard.sends == "an empty line"
    with create_pipe_input() as keys:
        keyboard._session = toolkit.PromptSession(input=keys, output=DummyOutput())
        keys.send_text("one\rtwo\x1b\rthree\r")
        assert keyboard.sends == "Alt-Enter"
        assert keyboard.ask(multiline=True) == "one\ntwo"
        assert keyboard.ask(multiline=False) == "three"


def test_multiline_without_alt_enter(example, capsys, monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(example("chat").Chat, "answer", lambda self, prompt: seen.append(prompt))
    talk(example, monkeypatch, "/mli", "one", "two", "", "/mli", "three")
    assert seen == ["one\ntwo", "three"]
    assert "an empty line sends" in capsys.readouterr().out


def test_modes_that_reason(example) -> None:
    modes = example("chat_modes").MODES
    turns = [("one", "<think>hm</think>\n1"), ("two", "")]
    assert modes["ds4"].render(turns, "S", think=False) == (
        "<｜begin▁of▁sentence｜>S<｜User｜>one<｜Assistant｜></think>1<｜end▁of▁sentence｜>"
        "<｜User｜>two<｜Assistant｜></think>"
    )
    assert modes["ds4"].render(turns[1:], "", think=True) == (
        "<｜begin▁of▁sentence｜><｜User｜>two<｜Assistant｜><think>"
    )
    tag = ":opensource"
    think = f"<think{tag}></think{tag}>"
    turns = [("one", f"<think{tag}>hm</think{tag}>1"), ("two", "")]
    assert modes["hy3"].render(turns, "S", think=False) == (
        f"<｜hy_begin_of_sentence{tag}｜>S<｜reasoning_mode{tag}｜>reasoning_effort:no_think"
        f"<｜hy_User{tag}｜>one<｜hy_Assistant{tag}｜>{think}1<｜hy_eos{tag}｜>"
        f"<｜hy_User{tag}｜>two<｜hy_Assistant{tag}｜>{think}"
    )
    thinking = modes["hy3"].render(turns[1:], "", think=True)
    assert thinking.endswith(f"<｜hy_Assistant{tag}｜><think{tag}>") and ":high<" in thinking


def test_chat_with_an_adapter(example, capsys, tmp_path: Path) -> None:
    from exl3 import Config, Model
    from tests.model.peft_adapters import PeftAdapter

    plain = Model.from_config(Config.from_directory(str(MODEL)))
    directory = PeftAdapter(plain, size=1.0).save(tmp_path)
    greedy = ("-prompt", "Hello", "-temp", "0")
    said = []
    for more in ((), ("-lora", str(directory))):
        assert chat(example, *greedy, *more) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]
    assert chat(example, *greedy, "-lora", str(tmp_path / "none")) == 1
    assert chat(example, *greedy, "-vis") == 1
    assert "debug window" in capsys.readouterr().err


def test_chat_with_guidance(example, capsys, monkeypatch) -> None:
    """Answers are led away from those to another system prompt; both must fit the cache."""
    greedy = ("-prompt", "Hello", "-temp", "0", "-sp", "Be brief.")
    said = []
    shout = "-nsp Shout."
    for more in ("", "-cfg 1", f"{shout} -cfg 1", shout, f"{shout} -cfg 1.5", f"{shout} -cfg 9"):
        assert chat(example, *greedy, *more.split()) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and said[3] == said[4] and len(set(said)) == 3
    assert chat(example, *greedy, "-cfg", "2") == 2
    assert "-cfg needs -nsp" in capsys.readouterr().err
    assert chat(example, *greedy, "-nsp", "", "-cfg", "-2") == 1
    assert "cfg_scale is -2.0, expected" in capsys.readouterr().err
    turns = ("a " * 300, "b " * 150)  # one of them fits the cache twice, both do not
    assert talk(example, monkeypatch, *turns, arguments=("-nsp", "Shout.")) == 0
    assert "the 1 oldest turns no longer fit" in capsys.readouterr().out
    assert chat(example, "-prompt", "a " * 700) == 0
    assert chat(example, "-prompt", "a " * 700, "-nsp", "Shout.") == 1
    assert "does not fit" in capsys.readouterr().out
