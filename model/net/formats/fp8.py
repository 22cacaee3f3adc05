"""Weights in floats of 8 bits (e4m3) with scales in float: of the whole matrix, of each row, or of blocks such as 128 x 128.

NAME is kept beside NAME_scale_inv (DeepSeek, Qwen3: of blocks) or NAME_scale (of a matrix or its rows). Both are multiplied
by. They become plain numbers: no CPU multiplies floats of 8 bits.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from model.net.formats.reading import SCALES, Find, Part, Settings, Stored, Tensors, refused

FLOATS = ("F8_E4M3",)
POWERS = "F8_E8M0"
"""Scales that are powers of two, in a byte each."""
PLAIN = "its weights become plain numbers, for no CPU multiplies floats of 8 bits"
SPARE = (".input_scale", ".activation_scale", ".input_scale_ub", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Endings of the names of scales of activations: those are not rounded here, or with scales of our own."""


class Fp8:
    """All matrices that are stored in e4m3."""

    def __init__(self, settings: Settings) -> None:
        block = settings.get("weight_block_size")
        if block is not None and not is_block(block):
            raise refused(f"weight_block_size must be two numbers of rows and columns; got {block!r}")
        self.block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        if settings.get("fmt", "e4m3") != "e4m3":
            raise refused(f"FP8 in the format {settings['fmt']!r} is not supported; known: 'e4m3'")
        self.title = "FP8, " + (
            "scales of rows or of matrices" if block is None else f"scales of blocks of {block[0]} x {block[1]}"
        )
        self.notes = (PLAIN,)

    def holds(self, name: str, stored: Stored) -> bool:
        """Whether it is stored in these floats."""
        return stored(name) in FLOATS

    def parts(self, name: str, shape: Sequence[int], stored: Stored) -> dict[str, Part]:
        """The matrix and its scales, under whichever name they are there."""
        plain = stored(f"{name}_scale") is not None or (self.block is None and stored(f"{name}_scale_inv") is None)
        return parts(name, f"{name}_scale" if plain else f"{name}_scale_inv", shape, self.block)

    def form(self, name: str, tensor: Find) -> None:
        """Plain numbers."""
        return

    def read(self, name: str, shape: Sequence[int], tensors: Tensors) -> Iterator[Tensor]:
        """The whole in float32."""
        yield dense(tensors["weight"], tensors["scale"], self.block)

    def is_spare(self, name: str, tensor: Callable[[], Tensor]) -> bool:
        """Scales of activations are."""
        return name.endswith(SPARE)


def is_block(block: object) -> bool:
    """Whether it is the rows and columns of a block."""
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def parts(name: str, scale: str, shape: Sequence[int], block: tuple[int, int] | None) -> dict[str, Part]:
    """A matrix and its scales: of blocks, or of each row or the whole."""
    *experts, rows, columns = shape
    if block is None:
        shapes = ((), (1,), (rows, 1), (rows,)) if not experts else ((*experts, rows, 1), (*experts, 1, 1))
    else:
        shapes = ((*experts, -(-rows // block[0]), -(-columns // block[1])),)
    return {
        "weight": Part(name, FLOATS, (tuple(shape),)),
        "scale": Part(scale, (*SCALES, POWERS), shapes),
    }


def dense(weight_OI: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The numbers, float32."""
    dense_OI, scale = weight_OI.float(), scale.float()
    if block is None:
        return dense_OI.mul_(scale[:, None] if scale.dim() == 1 else scale)
    scales_OG = scale.repeat_interleave(block[0], dim=-2)[..., : dense_OI.shape[-2], :]
    for group, columns_OI in enumerate(dense_OI.split(block[1], dim=-1)):
        columns_OI.mul_(scales_OG[..., group : group + 1])
    return dense_OI
