"""Programs written for ExLlamaV3 find everything under its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = """
import importlib, importlib.util, sys
assert importlib.util.find_spec("exllamav3") is None
from exl3.compat import install_alias
install_alias()
install_alias()
assert importlib.util.find_spec("exllamav3") is not None
assert importlib.util.find_spec("exllamav3.nothing") is None
import exllamav3.version, exl3, exl3.version
assert exllamav3.version.__version__ == "1.4.1+exl3." + exl3.version.__version__
assert exl3.version.__version__ == exl3.__version__ != exllamav3.version.__version__
from exllamav3.generator.sampler import CustomSampler
import exllamav3.generator.sampler.custom as custom
import exl3.generator.sampler
assert CustomSampler is exl3.generator.sampler.CustomSampler is exllamav3.CustomSampler
assert custom is sys.modules["exl3.generator.sampler.custom"]
assert custom.__spec__.name == "exl3.generator.sampler.custom"
assert exllamav3.generator is exl3.generator
from exllamav3 import Generator
assert Generator is exl3.Generator
try:
    import exllamav3.nothing
except ModuleNotFoundError as error:
    assert "exllamav3.nothing" in str(error)
else:
    raise SystemExit("found a module that does not exist")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_alias_gives_the_same_objects() -> None:
    done = run(CODE)
    assert done.returncode == 0, done.stderr


def test_one_file_package() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'packaging' / 'exllamav3')!r})\n"
        "import exllamav3\nfrom exllamav3.tokenizer import Tokenizer\n"
        "from exllamav3 import Tokenizer as T\nimport exl3\n"
        "assert T is Tokenizer is exl3.Tokenizer\n"
        "from exllamav3.version import __version__ as v\nassert v.startswith('1.4.1+exl3.')\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_alias_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    from exl3.compat import install_alias

    monkeypatch.setitem(sys.modules, "exllamav3.cache", sys)
    with pytest.raises(ValueError, match=r"exllamav3\.cache is loaded already"):
        install_alias()


CONFORMANCE = {
    "exllamav3": "AsyncGenerator AsyncJob Cache Config Model Tokenizer Filter LLGuidanceFilter",
    "exllamav3.cache": "CacheLayer_quant",
    "exllamav3.tokenizer": "MMEmbedding",
    "exllamav3.generator.sampler": "CustomSampler SS_Temperature SS_RepP SS_PresFreqP SS_Argmax "
    "SS_MinP SS_TopK SS_TopP SS_Sample SS_Base SS_AdaptiveP SS_BanTokens SS_XTC SS_LogitBias",
    "exllamav3.generator.sampler.presets": "ComboSampler DefaultSampler",
    "exllamav3.generator.filter": "Filter FormatronFilter LLGuidanceFilter",
    "exllamav3.generator": "Generator Job AsyncGenerator AsyncJob",
    "exllamav3.util": "Timer cuda_sync_active",
    "exllamav3.util.progress": "ProgressBar",
    "exllamav3.util.memory": "free_mem",
    "exllamav3.util.measures": "compute_kl_div compute_target_log_probs cosine_error sqnr",
    "exllamav3.constants": "PAGE_SIZE",
}


def test_names_that_programs_import() -> None:
    lines = [f"from {module} import {', '.join(n.split())}" for module, n in CONFORMANCE.items()]
    done = run("\n".join(["import exl3.compat", "exl3.compat.install_alias()", *lines]))
    assert done.returncode == 0, done.stderr
