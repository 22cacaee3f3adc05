"""The deterministic mode: a request's tokens have the same bits whatever its neighbours, chunks, preemptions or replica.

It needs kernels that sum each value in one order. Whether this machine's do is tested at every start.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attend.model.engine.ranks import ShardRunner
from attend.model.engine.runner import ModelRunner
from attend.model.errors import SettingError
from attend.model.net.paged_attention import Row
from attend.model.transfer import integers

CHUNKS = (1, 7, 33)
OTHER_REQUESTS = 5
"""Other requests in the batch."""


def check_batch_invariance(runner: ModelRunner, num_blocks: int, max_model_len: int) -> None:
    """Compute one text whole, in chunks and beside other requests, in the blocks of an idle engine; the scores must be equal
    to the bit. Raises SettingError.

    Each group of layers has `num_blocks` blocks or more, and the same of them are used in all groups.
    The text covers three blocks and a token, if there is room for that and another request. A cache of one block has no room
    for two requests.
    """
    size = runner.cache.block_size
    length = min(3 * size + 1, max_model_len, max(1, num_blocks - 1) * size)
    text = torch.randint(runner.net.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = range(1, num_blocks + 1)
    wanted = _scores(runner, _compute_hidden(runner, text, blocks, length))
    for chunk in CHUNKS:
        if not torch.equal(wanted, _scores(runner, _compute_hidden(runner, text, blocks, chunk))):
            _refuse(runner, f"chunked prefill with chunks of {chunk} gives other logits than the whole prompt")
    room = num_blocks - -(-length // size)
    others = [Row([blocks[-1 - at]], 0, min(1 + at, length, size)) for at in range(min(OTHER_REQUESTS, room))]
    if not torch.equal(wanted, _scores(runner, _compute_hidden(runner, text, blocks, 16, others))):
        _refuse(runner, "a request in a batch gives other logits than alone")


def _refuse(runner: ModelRunner, why: str) -> None:
    needs = "it needs the native one" + (", without tensor_parallel" if isinstance(runner, ShardRunner) else "")
    raise SettingError(f"deterministic is set, but with the {runner.backend.name} backend {why}: {needs}")


def _compute_hidden(
    runner: ModelRunner, text: Sequence[int], blocks: Sequence[int], chunk: int, others: Sequence[Row] = ()
) -> Iterator[Tensor]:
    """Hidden states of the text's tokens, a chunk at a time, with other requests in each step."""
    for start in range(0, len(text), chunk):
        mine = Row(blocks, start, min(chunk, len(text) - start))
        rows = sorted([*others, mine], key=lambda row: row.count != 1)
        before = sum(row.count for row in rows[: rows.index(mine)])
        tokens = [token for row in rows for token in text[row.start : row.start + row.count]]
        states = [row.blocks[0] for row in rows] if runner.has_states else None
        hidden_TE = runner.hidden(rows, integers(tokens, runner.device), states=states)
        yield hidden_TE[before : before + mine.count]


@torch.inference_mode()
def _scores(runner: ModelRunner, parts: Iterator[Tensor]) -> Tensor:
    """The scores that follow each token, asked for part by part."""
    return torch.cat([runner.net.logits(hidden_TE) for hidden_TE in parts])
