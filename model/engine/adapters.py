"""The LoRA adapters of an engine: read from folders, found again by their content, applied in the steps of their requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from attend.model.engine.plan import StepInput
from attend.model.errors import CheckpointError
from attend.model.net.adapters import Adapter, AdapterBatch, SupportsAdapters, Targets


class Adapters:
    """Holds weak references alone: an adapter lives as long as a caller of `read` or a request holds it."""

    def __init__(self, targets: Targets, decoder: SupportsAdapters) -> None:
        self._targets = targets
        self._decoder = decoder
        self._known: WeakValueDictionary[str, Adapter] = WeakValueDictionary()

    def read(self, folder: Path) -> Adapter:
        """The adapter of a folder, ready for the next step; the loaded one where an adapter has the same content.

        Called by one thread at a time, not the step thread. Raises CheckpointError with one sentence that names the file and
        the tensor.
        """
        adapter = self._targets.read(folder)
        known = self._known.get(adapter.digest)
        if known is not None:
            return known
        try:
            adapter = self._decoder.prepare(adapter)
        except MemoryError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        self._known[adapter.digest] = adapter
        return adapter

    @contextmanager
    def active(self, step: StepInput) -> Iterator[None]:
        """Within this block the decoder computes a step's tokens with the adapters of their requests."""
        groups = self._groups(step)
        if not groups:
            yield
            return
        self._decoder.use(groups, step.num_tokens)
        try:
            yield
        finally:
            self._decoder.use((), 0)

    def _groups(self, step: StepInput) -> list[AdapterBatch]:
        tokens: dict[str, list[int]] = {}
        begin = 0
        for name, count in zip(step.request_ids, step.counts, strict=True) if step.adapters else ():
            if name in step.adapters:
                tokens.setdefault(step.adapters[name], []).extend(range(begin, begin + count))
            begin += count
        return [AdapterBatch(self._known[digest], places) for digest, places in tokens.items()]
