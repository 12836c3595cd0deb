"""Builds exl3_ext: one shared library per backend on torch's stable ABI, by ninja.

All metadata is in pyproject.toml. The libraries link no Python symbol, so one wheel serves every
Python. `_cpu` is always built; the files of each instruction level get that level's flags. `_cuda`
is built when a CUDA compiler is found and a GPU is present or architectures are named:

    EXL3_BUILD_CUDA       0: leave `_cuda` out; 1: build it, also without a GPU
    TORCH_CUDA_ARCH_LIST  architectures from 7.5 on, e.g. "8.6;9.0", "7.5+PTX"; default: of the GPUs
                          here, else all of which the compiler knows
    MAX_JOBS, CXX         as usual
"""

from __future__ import annotations

import os
import platform
import re
import shutil
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
    "-mavx512vnni -mprefer-vector-width=512 -Wno-maybe-uninitialized "
    "-Wno-uninitialized"  # GCC's own headers
)
AMX = f"{AVX512} -mamx-tile -mamx-int8"
LEVEL_FLAGS = {"avx2": AVX2, "avx512": AVX512, "amx": AMX}
ALL_CUDA_ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0a", "10.0", "12.0")


def host_sources(backend: str) -> list[tuple[Path, str]]:
    """The C++ files of a backend's library, each with the extra flags of its folder."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    paths = [*SOURCE.glob(f"bind/{backend}/*.cpp"), *SOURCE.glob(f"{backend}/**/*.cpp")]
    if backend == "cpu":
        paths.append(SOURCE / "bind" / "schema.cpp")
    return [
        (path, LEVEL_FLAGS.get(path.parent.name, ""))
        for path in sorted(paths)
        if x86 or path.parent.name not in LEVEL_FLAGS
    ]


def cuda_compiler() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").exists():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def cuda_toolkit(compiler: str) -> Path:
    """The toolkit's folder, asked of the compiler: nvcc on PATH may be a wrapper script."""
    command = [compiler, "--dryrun", "-x", "cu", "-c", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    found = re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)
    return Path(found.group(1)).resolve() if found else Path(compiler).resolve().parents[1]


def is_new_enough(arch: str) -> bool:
    return float(arch.rstrip("af")) >= float(ALL_CUDA_ARCHITECTURES[0])


def gpu_architectures() -> list[str]:
    """Compute capabilities of the GPUs here that the kernels are written for."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if not shutil.which(query[0]):
        return []
    found = subprocess.run(query, capture_output=True, text=True).stdout.split()
    fit = {arch for arch in found if re.fullmatch(r"\d+\.\d", arch) and is_new_enough(arch)}
    return sorted("9.0a" if arch == "9.0" else arch for arch in fit)


def named_architectures() -> list[str]:
    """What TORCH_CUDA_ARCH_LIST names; 9.0 with its own instructions (wgmma)."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").split(";")
    found = [arch for arch in named if arch]
    for arch in found:
        number = arch.removesuffix("+PTX")
        if not re.fullmatch(r"\d+\.\d[af]?", number) or not is_new_enough(number):
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST: expected compute capabilities from "
                f'{ALL_CUDA_ARCHITECTURES[0]} on, such as "8.6;9.0" or "7.5+PTX", got {arch!r}'
            )
    return [re.sub(r"^9\.0(?!a)", "9.0a", arch) for arch in found]


def known_architectures() -> list[str]:
    """Those of all that the compiler here knows."""
    command = [cuda_compiler() or "nvcc", "--list-gpu-arch"]
    known = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return [
        arch
        for arch in ALL_CUDA_ARCHITECTURES
        if f"compute_{arch.rstrip('a').replace('.', '')}" in known
    ]


def cuda_architectures() -> list[str]:
    """Compute capabilities to build for, e.g. ["8.6", "9.0a", "12.0+PTX"]."""
    return named_architectures() or gpu_architectures() or known_architectures()


def code_flags(arch: str) -> str:
    """nvcc's flags for one: machine code, and with +PTX what later cards can compile for themselves
    (the instructions of 9.0a are for 9.0 alone)."""
    number = arch.removesuffix("+PTX").replace(".", "")
    flags = f"-gencode=arch=compute_{number},code=sm_{number}"
    if arch.endswith("+PTX"):
        plain = f"compute_{number.rstrip('a')}"
        flags += f" -gencode=arch={plain},code={plain}"
    return flags


def wants_cuda() -> bool:
    choice = os.environ.get("EXL3_BUILD_CUDA", "")
    if choice == "1" and cuda_compiler() is None:
        raise SystemExit("EXL3_BUILD_CUDA=1, but no nvcc: put it on PATH or set CUDA_HOME")
    if choice in ("0", "1"):
        return choice == "1"
    return cuda_compiler() is not None and bool(named_architectures() or gpu_architectures())


class NinjaFile:
    """The text of a build.ninja for one library."""

    def __init__(self, build: Path) -> None:
        from torch.utils import cpp_extension

        self.build = build
        self.objects: list[str] = []
        include = " ".join(f"-isystem {p}" for p in cpp_extension.include_paths())
        self.torch_libraries = " ".join(f"-L{p}" for p in cpp_extension.library_paths())
        self.lines = [
            f"cxx = {os.environ.get('CXX', 'c++')}",
            "flags = -O3 -std=c++20 -fPIC -fvisibility=hidden -pthread -Wall -Wextra "
            f"-Wno-unused-parameter -ffp-contract=off -DTORCH_TARGET_VERSION={TORCH_TARGET}ULL "
            f"-I{SOURCE} -I{SOURCE / 'include'} {include}",
            "rule compile",
            "  command = $cxx -MMD -MF $out.d $flags $extra -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]

    def add(self, path: Path, rule: str, extra: str = "") -> None:
        target = self.build / path.relative_to(SOURCE).with_suffix(".o")
        self.objects.append(str(target))
        self.lines += [f"build {target}: {rule} {path}", f"  extra = {extra}"]

    def add_cuda_rule(self, compiler: str) -> None:
        targets = " ".join(code_flags(arch) for arch in cuda_architectures())
        self.lines += [
            "rule cuda",
            f"  command = {compiler} -O3 -std=c++20 -Xcompiler -fPIC,-fvisibility=hidden "
            f"--expt-relaxed-constexpr -lineinfo -Xptxas -warn-spills {targets} "
            f"-I{SOURCE} -I{SOURCE / 'include'} -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]

    def link(self, output: Path, libraries: str) -> None:
        self.lines += [
            "rule link",
            f"  command = $cxx $in -shared -pthread -s {self.torch_libraries} {libraries} -o $out",
            f"build {output}: link {' '.join(self.objects)}",
            f"default {output}",
            "",
        ]

    def run(self) -> None:
        self.build.mkdir(parents=True, exist_ok=True)
        text = "\n".join(self.lines)
        file = self.build / "build.ninja"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        command = [sys.executable, "-m", "ninja"]
        if subprocess.run([*command, "--version"], capture_output=True).returncode != 0:
            command = ["ninja"]
        jobs = os.environ.get("MAX_JOBS")
        extra = ["-j", jobs] if jobs else []
        subprocess.run([*command, "--quiet", "-C", str(self.build), *extra], check=True)


def build_cpu(output: Path) -> None:
    file = NinjaFile(ROOT / "build" / "cpu")
    for path, extra in host_sources("cpu"):
        file.add(path, "compile", extra)
    file.link(output, "-ltorch -ltorch_cpu")
    file.run()


def build_cuda(output: Path) -> None:
    compiler = cuda_compiler()
    assert compiler is not None
    file = NinjaFile(ROOT / "build" / "cuda")
    file.add_cuda_rule(compiler)
    toolkit = cuda_toolkit(compiler)
    for path, _ in host_sources("cuda"):
        file.add(path, "compile", f"-isystem {toolkit / 'include'}")
    for path in sorted(SOURCE.glob("cuda/**/*.cu")):
        file.add(path, "cuda")
    # The static runtime shares the device context with torch's own, whatever its version. libtorch
    # must be named although this machine's torch may have no CUDA symbol to offer.
    file.link(
        output,
        f"-L{toolkit / 'lib64'} -lcudart_static -ldl -lrt -Wl,--no-as-needed -ltorch -ltorch_cpu",
    )
    file.run()


class NinjaBuild(build_ext):
    """Runs ninja in place of distutils' own compiler calls."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no Python ABI tag: it uses none

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        {"exl3_ext._cpu": build_cpu, "exl3_ext._cuda": build_cuda}[ext.name](output)


def wheel_command() -> dict[str, type]:
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:
        return {}

    class AnyPythonWheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    return {"bdist_wheel": AnyPythonWheel}


libraries = ["exl3_ext._cpu"] + (["exl3_ext._cuda"] if wants_cuda() else [])
setup(
    ext_modules=[Extension(name, sources=[]) for name in libraries],
    cmdclass={"build_ext": NinjaBuild, **wheel_command()},
)
