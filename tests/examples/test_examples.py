"""The example programs, on a small model."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODEL = ROOT / "tests" / "fixtures" / "golden" / "tiny_llama_exl3"
REPORT = {
    "bits": 4.0,
    "modules": [
        {
            "key": f"model.layers.{i}",
            "layers": [
                {"key": f"model.layers.{i}.self_attn.{name}", "proxy_error": 1e-3 * (i + 1)}
                for name in ("q_proj", "o_proj")
            ],
        }
        for i in range(2)
    ],
}


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The small model, with a chat template."""
    folder = tmp_path / "tiny-exl3-4bpw"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: importlib.import_module(name)


def chat(example, *arguments: str, model: Path = MODEL, mode: str = "raw") -> int:
    base = ["-m", str(model), "-mode", mode, "-cs", "1024", "-maxr", "6", "-basic"]
    return example("chat").main([*base, *arguments])


def test_generate(example, capsys, model: Path) -> None:
    example("generate").main(str(model), "Once")
    said = capsys.readouterr().out
    assert said.startswith("Once") and "per second" in said


@pytest.mark.parametrize("script", ["generate.py", "chat.py", "demo.py"])
def test_a_wrong_directory_is_one_clear_line(script: str, tmp_path: Path) -> None:
    flags = {"generate.py": [], "chat.py": ["-m"], "demo.py": ["--model"]}[script]
    code = "import runpy, sys; sys.path.insert(0, ''); sys.argv = sys.argv[1:]\n"
    code += f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / script), *flags, str(tmp_path / "none")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 1
    said = (done.stdout + done.stderr).replace("\n", "")
    assert said.count("error: ") == 1 and "none" in said and "Traceback" not in said


def test_without_the_compiled_library(example, capsys, monkeypatch) -> None:
    def missing() -> None:
        raise ImportError("_cpu.so does not exist: run `make build`")

    monkeypatch.setattr("exl3.model_init.init", lambda *_, **__: missing())
    assert chat(example, "-prompt", "Hello") == 1
    assert "error: _cpu.so does not exist" in capsys.readouterr().err


def test_chat_one_prompt(example, capsys, tmp_path: Path) -> None:
    saved = tmp_path / "answer.txt"
    assert chat(example, "-prompt", "Hello", "-tps", "-temp", "0", "-save", str(saved)) == 0
    out = capsys.readouterr().out
    assert saved.read_text(encoding="utf-8").strip()[:4] in out and "tokens/s" in out
    assert chat(example, "-prompt", "a " * 3000) == 1
    assert "does not fit" in capsys.readouterr().out


def test_chat_with_drafts(example, capsys, model: Path) -> None:
    flags = ["-prompt", "Hello", "-tps", "-temp", "0", "-dm", str(model)]
    assert chat(example, *flags) == 0
    assert " -- 4 of 4 drafted tokens were right" in capsys.readouterr().out
    # The budget of reasoning tokens is passed by in the middle of a draft.
    think = ["-think", "-think_budget", "3", "-maxr", "60", "-ndt", "3"]
    assert chat(example, *flags, *think, mode="chatml") == 0
    assert capsys.readouterr().out.count("</think>") == 1
    assert chat(example, "-prompt", "Hello", "-ngram", "1", "-dds", "-dskip", "0.5") == 0


def test_chat_with_the_models_own_template(example, capsys, model: Path) -> None:
    assert chat(example, "-prompt", "Hello", model=model, mode="auto") == 0
    assert chat(example, "-prompt", "Hello", mode="auto") == 1
    said = capsys.readouterr().err
    assert "no chat template" in said and "-mode raw" in said
    assert chat(example, "-prompt", "Hello", "-temp", "-0.5") == 1
    assert "--temperature: -0.5" in capsys.readouterr().err


def test_chat_modes_need_no_model(example, capsys) -> None:
    assert example("chat").main(["-modes"]) == 0
    listed = capsys.readouterr().out.split()
    assert {"auto", "raw", "llama3", "chatml", "smollm3", "commanda"} <= set(listed)


def test_chat_commands(example, capsys, monkeypatch, tmp_path: Path) -> None:
    from rich.console import Console

    file = tmp_path / "session.json"
    lines = [
        "Hello",
        "/t",
        "/sp Be brief.",
        "/ban foo",
        "/probs 2",
        "/r",
        "/probs 0",
        "/n 2 Tell me",
        f"/save {file}",
        "/clear",
        "/r",
        f"/load {file}",
        "/e And so",
        "/cc",
        "/gm",
        "/ppt",
        "/nothing",
        "/h",
        *["word " * 60] * 6,
        "/x",
    ]
    queue = iter(lines)
    monkeypatch.setattr(Console, "input", lambda self, *args, **kwargs: next(queue))
    assert chat(example) == 0
    out = capsys.readouterr().out
    for expected in (
        "system prompt: Be brief.",
        "banned: ['foo']",
        "--- 2",
        "there is nothing to repeat",
        "loaded 1 turns",
        "And so",
        "0 code blocks",
        "pages: 4",
        "unknown command /nothing",
        "oldest turns no longer fit",
    ):
        assert expected in out, expected
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved["system_prompt"] == "Be brief." and saved["context"][0][0] == "Hello"


def test_every_mode_renders(example) -> None:
    modes: ModuleType = example("chat_modes")
    turns = [("one", "1"), ("two", "")]
    for name in modes.MODES:
        mode = modes.mode_of(name, "User", "Bot")
        if mode.turn is None:
            continue
        text = mode.render(turns, "SYSTEM", think=False)
        order = [text.index(part) for part in ("SYSTEM", "one", "1", "two")]
        assert order == sorted(order) and "{" not in text, name
        assert "SYSTEM" not in mode.render(turns, "", think=False)
    assert modes.mode_of("raw", "Ann", "Bob").render(turns, "", think=False) == (
        "Ann: one\nBob:1\nAnn: two\nBob:"
    )


def test_demo_measures_and_checks_the_answer(example, capsys, monkeypatch, model: Path) -> None:
    demo = example("demo")
    monkeypatch.setattr(demo.Target, "convert", lambda self: None)
    monkeypatch.setattr(demo.Loaded, "answer", lambda self, question: "Rome")
    monkeypatch.setattr(demo.Target, "out", model)
    arguments = ["--model", str(MODEL), "--tokens", "80"]
    assert demo.main(arguments) == 1
    said = capsys.readouterr().out
    assert "does not say Paris" in said and "0.0000" in said
    monkeypatch.setattr(demo.Loaded, "answer", lambda self, question: "It is Paris.")
    assert demo.main(arguments) == 0
    assert demo.main(["--model", str(model / "none")]) == 1


def test_demo_knows_a_finished_conversion(example, tmp_path: Path) -> None:
    demo = example("demo")
    from exl3 import Config

    target = demo.Target(MODEL, tmp_path, 3.0, 6, 10, 20)
    assert not target.is_finished()
    target.out.mkdir()
    report = {
        "source_fingerprint": Config.from_directory(str(MODEL)).source.fingerprint(),
        "options": {"bits": 3.0, "head_bits": 6},
        "calibration": {"rows": 10, "cols": 20},
    }
    file = target.out / "conversion_report.json"
    file.write_text(json.dumps(report))
    assert target.is_finished()
    report["calibration"]["rows"] = 11
    file.write_text(json.dumps(report))
    assert not target.is_finished()


def test_demo_goes_on_or_starts_anew(example, monkeypatch, tmp_path: Path) -> None:
    demo = example("demo")
    from exl3.conversion import convert_model

    calls, status = [], [0]
    monkeypatch.setattr(convert_model, "run", lambda argv: calls.append(argv) or status[0])
    target = demo.Target(MODEL, tmp_path, 3.0, 6, 10, 20)
    target.convert()
    target.work.mkdir()
    stored = target.work / "args.json"
    stored.write_text(json.dumps(target.options()))
    target.convert()
    stored.write_text(json.dumps({**target.options(), "cal_rows": 5}))
    target.convert()
    assert [("-r" in c, "--restart" in c) for c in calls] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    for status[0], word in ((130, "interrupted"), (1, "failed")):
        with pytest.raises(RuntimeError, match=word):
            target.convert()


@pytest.mark.slow
def test_demo_converts(example, capsys, tmp_path: Path) -> None:
    from tests.model.tiny_models import make_tiny

    source = tmp_path / "llama"
    make_tiny(source, "llama", torch.float16, vocab_size=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, source)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    arguments = ["--model", str(source), "--out", str(tmp_path / "demo"), "--tokens", "100"]
    arguments += ["--rows", "4", "--columns", "64", "--bits", "3", "5"]
    assert example("demo").main(arguments) == 1  # a random model knows no capitals
    first = capsys.readouterr().out
    assert "does not say Paris" in first
    start = time.perf_counter()
    assert example("demo").main(arguments) == 1
    assert time.perf_counter() - start < 30  # nothing is converted again


def run_notebook(name: str, model: Path) -> list:
    """Execute a notebook on a model; its outputs."""
    nbformat = pytest.importorskip("nbformat", reason="needs the notebook extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebook extra")
    pytest.importorskip("matplotlib", reason="needs the notebook extra")
    pytest.importorskip("ipykernel", reason="needs the notebook extra")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    parameters = next(cell for cell in notebook.cells if cell.source.startswith("directory ="))
    _, _, others = parameters.source.partition("\n")
    start = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    parameters.source = f"{start}directory = {str(model)!r}\n{others}"
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(EXAMPLES)}}
    ).execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not any(out.output_type == "error" for out in outputs)
    return outputs


def test_notebook(model: Path) -> None:
    (model / "conversion_report.json").write_text(json.dumps(REPORT))
    outputs = run_notebook("quantization.ipynb", model)
    assert any("image/png" in out.get("data", {}) for out in outputs)


def test_adapters_notebook(model: Path) -> None:
    pytest.importorskip("transformers")
    outputs = run_notebook("adapters.ipynb", model)
    text = "".join(out.get("text", "") for out in outputs if out.get("name") == "stdout")
    said = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    answers = [said[name] for name in said if name.strip() in ("none", "full", "half", "both")]
    assert len(answers) == 4 and len(set(answers)) > 2 and "True" in text.splitlines()
    assert float(said["relative difference"]) < 0.05
