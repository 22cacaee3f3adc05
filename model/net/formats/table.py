"""The formats of quantised checkpoints, by the `quant_method` of config.json, and why others are refused."""

from collections.abc import Callable, Mapping
from typing import Any

from model.net.formats.awq import Awq
from model.net.formats.compressed import CompressedTensors
from model.net.formats.fp8 import Fp8
from model.net.formats.gptq import Gptq
from model.net.formats.mxfp4 import Mxfp4
from model.net.formats.reading import Format, Settings, refused

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
STRANGERS = {
    "aqlm": "AQLM: sums of vectors from code books",
    "auto-round": "AutoRound in its own layout; it also writes auto_gptq and auto_awq",
    "bitnet": "BitNet: weights of -1, 0 and 1",
    "bitsandbytes": "bitsandbytes: NF4, FP4 or LLM.int8",
    "eetq": "EETQ: bytes in the order of a GPU kernel",
    "fp_quant": "FP-Quant: floats of 4 bits after a Hadamard transform",
    "higgs": "HIGGS: points of a grid after a Hadamard transform",
    "hqq": "HQQ: groups that run across the rows",
    "modelopt": "TensorRT Model Optimizer: NVFP4 or FP8 in its own layout",
    "mxfp8": "MXFP8: floats of 8 bits in blocks of 32",
    "nvfp4": "NVFP4: floats of 4 bits in blocks of 16",
    "quanto": "Quanto: tensors of its own classes",
    "quark": "Quark: AMD's own layouts",
    "spqr": "SpQR: outliers kept apart",
    "torchao": "torchao: tensors of its own classes",
    "vptq": "VPTQ: vectors from code books",
}
"""What is not read, in words."""
INSTEAD = "take the model's AWQ, GPTQ, compressed-tensors, FP8 or GGUF checkpoint, or its plain one with --quantize"


def format_of(raw: Mapping[str, Any]) -> Format | None:
    """The format that a config.json names, also for the text model that lies in it; None: all weights are plain."""
    text = raw.get("text_config")
    places = (raw, text if isinstance(text, dict) else {})
    keys = ("quantization_config", "compression_config")
    found = [place[key] for place in places for key in keys if place.get(key) is not None]
    if not found:
        return None
    settings = found[0]
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str):
        raise refused(f"it must be an object with a quant_method; got {str(settings)[:64]}")
    method = method.lower().replace("_", "-")
    known = {name.replace("_", "-"): name for name in (*FORMATS, *STRANGERS)}
    name = known.get(method, method)
    if name not in FORMATS:
        what = f" ({STRANGERS[name]})" if name in STRANGERS else ""
        raise refused(f"quant_method {method!r}{what} is not supported; known: {', '.join(FORMATS)}. Instead {INSTEAD}")
    try:
        return FORMATS[name](settings)
    except (TypeError, AttributeError) as error:  # somewhere in it
        raise refused(f"it has a value of the wrong type: {error}") from error
