"""The tensors of a checkpoint, whatever files hold them: each is asked for by its name and its shape, once.

A kind of files is a subclass. What is missing, unexpected, misshapen or not finite is noted with the file it should be in.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.errors import CheckpointError
from attend.model.net.families.family import Family
from attend.model.net.families.table import their_names
from attend.model.net.formats.blocks import Blocks
from attend.model.net.formats.codes import FP8, CodeLayout, Codes
from attend.model.net.mapped_memory import release

NOT_FINITE = "holds NaN or infinity"
SHOWN = 5
"""How many bad tensors one message names at most."""
Place = tuple[str, str]
"""The name of a tensor, and of its file."""


class Weights:
    """The tensors of the files of one kind, which remembers what was asked for."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path = path
        self.where: dict[str, str] = {}
        """File name of each tensor."""
        self.used: set[str] = set()
        self.problems: list[str] = []
        self.files = tuple(files)
        self.size = sum(file.stat().st_size for file in files)
        """Total size of the files in bytes."""
        self.read = 0
        """Bytes of the tensors that were taken."""
        self._taken: list[Tensor] = []
        self.origin = ""
        """File and name of what was taken last."""

    title: str | None = None
    """Name of the files' quantisation format, for the log; None: they are not quantised."""
    notes: tuple[str, ...] = ()
    """What of that is not carried out, or carried out in another way: for the log."""

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a kind of files that opens none does nothing."""

    def resolve_names(self, family: Family) -> Family:
        """The family with the names of the tensors that are there."""
        raise NotImplementedError

    def dtypes(self) -> set[str]:
        """What the tensors are stored in, as `attend inspect` names it."""
        raise NotImplementedError

    def form(self, name: str) -> CodeLayout | None:
        """Codes that keep a tensor's numbers exactly, or as nearly as codes can; None: the tensor is plain."""
        return None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor in the files; None where there is none of this name, or no reader needs its shape."""
        return None

    def find(self, name: str, shape: tuple[int, ...]) -> list[Place] | None:
        """The tensors that hold one of this name and shape; None after noting what is wrong."""
        raise NotImplementedError

    def _is_spare(self, name: str) -> bool:
        """True if a tensor that nobody asked for may be passed over."""
        return False

    def _map_tensor(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file, in its stored dtype."""
        raise NotImplementedError

    def _numbers(self, name: str, held: list[Tensor]) -> Iterator[Tensor | Codes | Blocks]:
        """What mapped tensors mean: pieces of one tensor, in the order of its rows."""
        raise NotImplementedError

    def take(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor | Codes | Blocks]:
        """A tensor in the mapped file, or pieces of one, in the order of its rows. Ends after noting what is wrong.

        Nobody has read the numbers yet: whoever does says to `are_finite` what they are.
        """
        places = self.find(name, shape)
        if places is None:
            return
        held = [self._map_tensor(part) for part, _ in places]
        self.read += sum(tensor.nbytes for tensor in held)
        stored, file = places[0]
        self._taken, self.origin = held, f"{file}: tensor {stored}"
        yield from self._numbers(stored, held)

    def are_finite(self, numbers: Tensor | Codes) -> bool:
        """True if numbers that were taken last are; notes it where they are not."""
        if finite := _is_finite(numbers):
            return finite
        self.problems.append(f"{self.origin} {NOT_FINITE}")
        return False

    def owns(self, tensor: Tensor) -> bool:
        """True if a tensor lies where one does that was taken last."""
        return any(tensor.untyped_storage().data_ptr() == taken.untyped_storage().data_ptr() for taken in self._taken)

    def release(self) -> None:
        """Let the pages go of what was taken last."""
        for tensor in self._taken:
            release(tensor)

    def check_tied(self, family: Family, config: ModelConfig) -> None:
        """Note a head that is not the embedding, though the config ties them: whoever trained it did not."""
        [name], [head] = (their_names(family, config, ours) for ours in ("embedding.tokens.weight", "head.weight"))
        if name in self.where and head in self.where:
            pair = [self._map_tensor(each) for each in (name, head)]
            if not torch.equal(*pair):
                told = f"tensor {head} is not {name}, but config.json has tie_word_embeddings"
                self.problems.append(f"{self.where[head]}: {told}")
            self._taken = pair
            self.release()

    def check(self, family: Family, *, tied_head: bool) -> None:
        """Raise if anything was wrong, or if there are tensors that nobody asked for."""
        heads = (family.weights or {}).get("head.weight", ("lm_head.weight",))
        left_out = tuple(family.left_out)
        for name, file in self.where.items():
            ignored = family.ignored_tensors.search(name) or name.startswith(left_out) or (tied_head and name in heads)
            if name not in self.used and not ignored and not self._is_spare(name):
                self.problems.append(f"{file}: tensor {name} is unexpected")
        if self.problems:
            more = len(self.problems) - SHOWN
            tail = f"; and {more} more" if more > 0 else ""
            raise CheckpointError(f"{self.path}: " + "; ".join(self.problems[:SHOWN]) + tail)


def _is_finite(numbers: Tensor | Codes) -> bool:
    parts = (numbers,) if isinstance(numbers, Tensor) else (numbers.scales_OG, numbers.minima_OG)
    if isinstance(numbers, Codes) and numbers.kind == FP8 and numbers.codes_OI.view(torch.float8_e4m3fn).isnan().any():
        return False
    # each bound is NaN where there is one
    return all(bound.isfinite() for part in parts if part is not None for bound in part.aminmax())
