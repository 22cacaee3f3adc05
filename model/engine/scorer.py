"""All scores of a checkpoint as the engine computes it, without requests: one text at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.runner import ModelRunner
from attend.model.net.paged_attention import Row
from attend.model.transfer import integers


class ServingScorer:
    """A `Scorer` of quality.py: the decoder, the attention and the cache that would serve under these options.

    Raises CheckpointError or SettingError.
    """

    def __init__(
        self,
        folder: Path,
        options: EngineOptions,
        context: int,
        report: Callable[[int, int], None] = lambda num_bytes, total: None,
    ) -> None:
        """`context`: tokens of the longest window. `report`: see `build_engine`."""
        alone = replace(options, max_model_len=context, max_batch_requests=1, max_batch_tokens=context)
        engine = build_engine(folder, alone, report)
        assert isinstance(engine.engine.runner, ModelRunner)
        self._runner = engine.engine.runner
        self._blocks = range(1, 1 + -(-context // engine.info.block_size))
        self.info = engine.info
        self.vocab_size = engine.info.vocab_size

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], first: int) -> Callable[[int, int], Tensor]:
        """See `Scorer`."""
        runner = self._runner
        states = [1] if runner.has_states else None
        hidden_TE = runner.hidden([Row(self._blocks, 0, len(tokens))], integers(tokens, runner.device), states=states)[first:]
        return lambda begin, end: runner.net.logits(hidden_TE[begin:end])
