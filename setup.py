"""Builds exl3_ext: one shared library per backend on torch's stable ABI, by ninja.

All metadata is in pyproject.toml. The libraries link no Python symbol, so one wheel serves every
Python; the CPU files of each instruction level get that level's flags.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SOURCE = ROOT / "exl3_ext"
TORCH_TARGET = "0x020a000000000000"  # torch 2.10: the oldest torch that the libraries load on

AVX2 = "-mavx2 -mfma -mf16c -mbmi2"
AVX512 = (
    f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mavx512vbmi -mavx512vbmi2 "
    "-mavx512vnni -mprefer-vector-width=512"
)
AMX = f"{AVX512} -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16"
LEVEL_FLAGS = {"avx2": AVX2, "avx512": AVX512, "amx": AMX}


def cpu_sources() -> list[tuple[Path, str]]:
    """Every file of the CPU library with the extra flags of its folder."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    found = []
    for path in sorted([*SOURCE.glob("cpu/**/*.cpp"), *SOURCE.glob("bind/**/*.cpp")]):
        level = path.parent.name
        if "cuda" in path.parts or (level in LEVEL_FLAGS and not x86):
            continue
        found.append((path, LEVEL_FLAGS.get(level, "")))
    return found


def write_ninja(build: Path, output: Path) -> None:
    """Write build.ninja for the CPU library."""
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    includes = " ".join(f"-isystem {p}" for p in cpp_extension.include_paths())
    libraries = " ".join(f"-L{p}" for p in cpp_extension.library_paths())
    lines = [
        f"cxx = {compiler}",
        "flags = -O3 -std=c++20 -fPIC -fvisibility=hidden -pthread -Wall -Wextra "
        f"-Wno-unused-parameter -ffp-contract=off -DTORCH_TARGET_VERSION={TORCH_TARGET}ULL "
        f"-I{SOURCE} -I{SOURCE / 'include'} {includes}",
        f"ldflags = -shared -pthread {libraries} -ltorch -ltorch_cpu -s",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags $extra -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx $in $ldflags -o $out",
    ]
    objects = []
    for path, extra in cpu_sources():
        target = build / path.relative_to(SOURCE).with_suffix(".o")
        objects.append(str(target))
        lines += [f"build {target}: compile {path}", f"  extra = {extra}"]
    lines += [f"build {output}: link {' '.join(objects)}", f"default {output}", ""]
    build.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines)
    file = build / "build.ninja"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


class NinjaBuild(build_ext):
    """Runs ninja in place of distutils' own compiler calls."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no Python ABI tag: it uses none

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        build = ROOT / "build" / "cpu"
        write_ninja(build, output)
        jobs = os.environ.get("MAX_JOBS")
        command = [sys.executable, "-m", "ninja", "--quiet", "-C", str(build)]
        if subprocess.run([*command, "--version"], capture_output=True).returncode != 0:
            command = ["ninja", "--quiet", "-C", str(build)]
        if jobs:
            command += ["-j", jobs]
        subprocess.run(command, check=True)


def wheel_command() -> dict[str, type]:
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:
        return {}

    class AnyPythonWheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    return {"bdist_wheel": AnyPythonWheel}


setup(
    ext_modules=[Extension("exl3_ext._cpu", sources=[])],
    cmdclass={"build_ext": NinjaBuild, **wheel_command()},
)
