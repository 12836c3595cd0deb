"""EXL3 directories in Hugging Face Transformers."""

from __future__ import annotations

from ..errors import UnsupportedError


def patch_transformers() -> None:
    """Register the quantisation method `exl3` with Transformers; harmless twice.

    After it `AutoModelForCausalLM.from_pretrained(directory)` loads an EXL3 directory, for
    inference only. Loading raises `ConfigError` (a `ValueError`) for anything but a local
    directory, and `UnsupportedError` for models whose layers Transformers fuses: it names them.

    Raises:
        UnsupportedError: Transformers is not installed, or too old.
    """
    try:
        from transformers.quantizers import auto
    except ImportError as error:
        raise UnsupportedError(
            f"patch_transformers needs the package transformers, 5.0 or later: {error}"
        ) from error
    from .hf_quantizer import METHOD, Exl3HfConfig, Exl3HfQuantizer

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Exl3HfConfig
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = Exl3HfQuantizer
