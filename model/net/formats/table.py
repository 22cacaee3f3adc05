"""The formats of quantised checkpoints, by the `quant_method` of config.json, and why others are refused."""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

from attend.model.errors import CheckpointError
from attend.model.net.formats.awq import Awq
from attend.model.net.formats.compressed_tensors import CompressedTensors
from attend.model.net.formats.format import Format, Settings, not_supported
from attend.model.net.formats.fp8 import Fp8
from attend.model.net.formats.gptq import Gptq
from attend.model.net.formats.mxfp4 import Mxfp4

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
UNSUPPORTED = {
    "aqlm": "AQLM: sums of vectors from code books",
    "auto-round": "AutoRound in its own layout; it also writes auto_gptq and auto_awq",
    "bitnet": "BitNet: weights of -1, 0 and 1",
    "bitsandbytes": "bitsandbytes: NF4, FP4 or LLM.int8",
    "eetq": "EETQ: bytes in the order of a GPU kernel",
    "exl2": "ExLlamaV2: matrices of mixed bits in the order of a GPU kernel",
    "exl3": "ExLlamaV3: trellis codes",
    "fouroversix": "Four Over Six: NVFP4 with two choices of a scale",
    "fp_quant": "FP-Quant: floats of 4 bits after a Hadamard transform",
    "higgs": "HIGGS: points of a grid after a Hadamard transform",
    "hqq": "HQQ: groups that run across the rows",
    "metal": "codes in the order of Apple's kernels",
    "mlx": "MLX: codes of Apple's library, with scales and biases of groups",
    "modelopt": "TensorRT Model Optimizer: NVFP4 or FP8 in its own layout",
    "mxfp8": "MXFP8: floats of 8 bits in blocks of 32",
    "nvfp4": "NVFP4: floats of 4 bits in blocks of 16",
    "quanto": "Quanto: tensors of its own classes",
    "quark": "Quark: AMD's own layouts",
    "sinq": "SINQ: scales of rows and of columns",
    "spqr": "SpQR: outliers kept apart",
    "torchao": "torchao: tensors of its own classes",
    "vptq": "VPTQ: vectors from code books",
}
"""Formats that are not supported, by `quant_method`, with their names."""
TENSORS = {
    "exl2": (".q_weight", ".q_scale", ".q_perm"),
    "exl3": (".trellis", ".suh", ".svh"),
    "mlx": (".biases",),
    "bitsandbytes": (".SCB", ".absmax", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
    "aqlm": (".codebooks",),
    "hqq": (".W_q",),
    "quanto": (".weight._data", ".weight._scale"),
}
"""How names of tensors end that only these have: folders may say nothing else of them."""
INSTEAD = "take the model's AWQ, GPTQ, compressed-tensors, FP8 or GGUF checkpoint, or its unquantised one with --quantize"


def format_of(raw: Mapping[str, Any]) -> Format | None:
    """The format that a config.json names, also for the text model that lies in it; None: all weights are plain."""
    text = raw.get("text_config")
    places = (raw, text if isinstance(text, dict) else {})
    if any(_is_mlx(place.get("quantization")) for place in places):
        raise CheckpointError(f"config.json: quantization: {_not_supported_text('mlx')}")
    keys = ("quantization_config", "compression_config")
    found = [place[key] for place in places for key in keys if place.get(key) is not None]
    if not found:
        return None
    settings = found[0]
    method = _method(settings) if isinstance(settings, dict) else None
    if method is None:
        raise not_supported(f"it must be an object with a quant_method; got {str(settings)[:64]}")
    known = {name.replace("_", "-"): name for name in (*FORMATS, *UNSUPPORTED)}
    name = known.get(method, method)
    if name not in FORMATS:
        raise not_supported(_not_supported_text(name))
    try:
        return FORMATS[name](settings)
    except (TypeError, AttributeError) as error:  # somewhere in it
        raise not_supported(f"it has a value of the wrong type: {error}") from error


def _method(settings: Settings) -> str | None:
    """The `quant_method`, with dashes; also that of those who write none."""
    method = settings.get("quant_method")
    if method is None and _is_mlx(settings):
        return "mlx"
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return method.lower().replace("_", "-") if isinstance(method, str) else None


def _is_mlx(settings: object) -> bool:
    """True if it is what MLX writes: bits and a group, and settings of single matrices beside them."""
    if not isinstance(settings, dict) or settings.keys() & {"quant_method", "desc_act", "zero_point"}:  # GPTQ, AWQ
        return False
    return {"bits", "group_size"} <= settings.keys()


def _not_supported_text(name: str) -> str:
    what = f" ({UNSUPPORTED[name]})" if name in UNSUPPORTED else ""
    return f"quant_method {name!r}{what} is not supported; known: {', '.join(FORMATS)}. Instead {INSTEAD}"


def unread_tensor(names: Collection[str]) -> str | None:
    """Why a folder without a quantisation config is refused: it has tensors of an unsupported format. None: it has none."""
    found = ((name, method) for name in names for method, ends in TENSORS.items() if name.endswith(ends))
    scaled = ((name, "mlx") for name in names if name.endswith(".scales") and f"{name[:-7]}.weight" in names)
    # MLX has codes in `weight`, and in some of its modes no biases.
    return next((f"tensor {name} is not read: {_not_supported_text(method)}" for name, method in chain(found, scaled)), None)
