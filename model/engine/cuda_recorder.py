"""CUDA graphs: a step over lasting buffers, recorded once and replayed without the cost of its launches.

Not yet run on a GPU. What records is an argument, so that tests on the CPU call what would be recorded.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a step that reads and writes only lasting buffers; returns a function that repeats it."""
Between = Callable[..., object]
"""What is done between two pieces; its arguments are the place's."""
PieceRecorder = Callable[[Callable[[Between], None]], Callable[[Between], None]]
"""Takes a step that calls its argument wherever it is to be cut; returns a function that repeats its pieces, and calls what it
is given between them, with the same arguments each time.
"""

WARM_UPS = 2
"""Calls before a recording: they compile kernels and let libraries take their memory, which must not be recorded."""


def no_op(*place: Any) -> None:
    """Do nothing between the pieces: a `Between`."""


class CudaRecorder:
    """Records on a stream of its own. All graphs share it and one pool: they never run at the same time, and libraries
    keep memory for each stream. All of them end together: torch gives that memory back with the first that ends.
    """

    def __init__(self) -> None:
        gc.collect()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch gives its constructor no types

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`: one piece."""
        return partial(self.in_pieces(lambda between: step()), no_op)

    def in_pieces(self, step: Callable[[Between], None]) -> Callable[[Between], None]:
        """See `PieceRecorder`."""
        graphs: list[torch.cuda.CUDAGraph] = []
        places: list[tuple[Any, ...]] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # other threads may call CUDA meanwhile: NCCL's looks at its events all the time
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end_piece(*place: Any) -> None:
            graphs[-1].capture_end()
            places.append(place)
            begin()

        def repeat(between: Between) -> None:
            for graph, place in zip(graphs, places, strict=False):
                graph.replay()
                between(*place)
            graphs[-1].replay()

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _nothing_freed():
            for _ in range(WARM_UPS):
                step(no_op)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            begin()
            try:
                step(end_piece)
            except BaseException:
                with suppress(RuntimeError):  # of a recording that is broken: what has broken it is told
                    graphs[-1].capture_end()
                raise
            graphs[-1].capture_end()
            repeat(no_op)  # what the driver takes for a first replay is taken now, and a bad recording is known
        torch.cuda.current_stream().wait_stream(self._stream)
        return repeat


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Disables garbage collection: no device memory may be freed during a recording."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
