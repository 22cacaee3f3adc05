"""The formats of quantised checkpoints, by the `quant_method` of config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from attend.model.net.formats.awq import Awq
from attend.model.net.formats.compressed_tensors import CompressedTensors
from attend.model.net.formats.format import Format, Settings, not_supported
from attend.model.net.formats.fp8 import Fp8
from attend.model.net.formats.gptq import Gptq
from attend.model.net.formats.mxfp4 import Mxfp4

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm-fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
INSTEAD = "take the model's AWQ, GPTQ, compressed-tensors, FP8 or GGUF checkpoint, or its unquantised one with --quantize"


def format_of(raw: Mapping[str, Any]) -> Format | None:
    """The format that a config.json names, also for the text model that lies in it; None: all weights are plain."""
    text = raw.get("text_config")
    places = (raw, text if isinstance(text, dict) else {})
    keys = ("quantization_config", "compression_config")
    settings = next((place[key] for place in places for key in keys if place.get(key) is not None), None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str):
        raise not_supported(f"it must be an object with a quant_method; got {str(settings)[:64]}. Instead {INSTEAD}")
    name = method.lower().replace("_", "-")
    if name not in FORMATS:
        raise not_supported(f"quant_method {method!r} is not supported; known: {', '.join(FORMATS)}. Instead {INSTEAD}")
    try:
        return FORMATS[name](settings)
    except (TypeError, AttributeError) as error:  # somewhere in it
        raise not_supported(f"it has a value of the wrong type: {error}") from error
