"""Ranks that share a decoder give the scores of one that has it whole: gloo, on CPUs."""

import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attend.model.errors import DeviceFailed, SettingError
from attend.model.net.checkpoint import load_decoder
from attend.model.net.transformer import Decoder
from attend.model.parallel.group import ProcessGroup
from attend.model.parallel.shards import check_shards, load_shard
from tests.model.checkpoints import tiny_config, write_checkpoint
from tests.model.parallel.shares import DTYPES, TOKENS, part, scores, share, sums

KINDS = {
    2: ["llama-biased", "qwen2-tied", "gpt2", "gemma2", "olmo2", "mixtral", "qwen2_moe", "gpt_oss", "glm4_moe", "youtu"],
    4: ["llama-biased", "gpt2", "olmo2", "mixtral"],
}
LATE = 60.0
"""Seconds, so that a busy machine fails no test."""


class Answer(NamedTuple):
    whole: Decoder
    scores: Tensor
    """Of the whole decoder, [T, V]."""
    shard: Decoder
    batched: Tensor
    alone: list[Tensor]
    seen: list[Tensor]
    """The scores that each rank has."""
    exact: tuple[Tensor, Tensor]
    """Batched and alone, where products and attention take each row or text by itself."""


class Answers(NamedTuple):
    group: ProcessGroup
    kinds: dict[str, Answer]
    """In float32."""
    rounded: dict[str, Answer]
    """In bfloat16."""
    sums: list[Tensor]
    seen: list[Tensor]


@contextmanager
def ranks_of(number, folders):
    """Rank 0 of so many, in this process, and the processes of the others."""
    group = ProcessGroup(0, number, "cpu", late=LATE)
    command = [sys.executable, "-m", "tests.model.parallel.shares"]
    started = [subprocess.Popen([*command, *map(str, (rank, number, group.port, LATE, *folders))]) for rank in range(1, number)]
    try:
        group.connect()
        yield group, started
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    """What the ranks made of each kind of checkpoint, and of sums. All but rank 0 have ended."""
    number, found = request.param, {dtype: {} for dtype in DTYPES}
    folders = {kind: write_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS[number]}
    with ranks_of(number, folders.values()) as (group, started):
        for kind, folder in folders.items():
            for dtype in DTYPES:
                whole = load_decoder(folder, dtype, "cpu", 64)
                found[dtype][kind] = Answer(whole, scores(whole, TOKENS), *share(folder, group, dtype))
        answers = Answers(group, *found.values(), *sums(group))
        assert [process.wait(60) for process in started] == [0] * (number - 1)
        yield answers


def test_scores_of_ranks_are_those_of_one(answers):
    for kind, answer in answers.kinds.items():
        difference = (answer.scores - answer.batched).abs().max() / answer.scores.abs().max()
        assert difference < 1e-5, (kind, float(difference))
        assert torch.equal(answer.scores.argmax(-1), answer.batched.argmax(-1)), kind


def test_rounded_scores_of_ranks_are_as_close_to_the_plain_ones_as_those_of_one(answers):
    """A rank's part of a product is rounded to bfloat16 before it is added. With experts a token may go to another one."""
    dense = {kind: answer for kind, answer in answers.rounded.items() if not answer.whole.config.num_experts}
    assert len(dense) >= 3
    for kind, answer in dense.items():
        plain = answers.kinds[kind].scores
        shared, alone = (float((found - plain).abs().mean()) for found in (answer.batched, answer.scores))
        assert 0 < shared < 1.25 * alone, (kind, shared, alone)


def test_a_row_of_a_sum_has_the_same_bits_in_any_message_and_on_every_rank(answers):
    whole, rows, behind, _ = answers.sums
    assert torch.equal(whole, rows)
    assert torch.equal(whole, behind)
    assert len(answers.seen) == answers.group.ranks
    assert all(torch.equal(whole, each) for each in answers.seen)


def test_sums_run_in_the_order_of_the_ranks(answers):
    parts = [part(rank) for rank in range(answers.group.ranks)]
    assert torch.equal(answers.sums[0], sum(parts[1:], parts[0]))
    if len(parts) > 2:
        assert not torch.equal(answers.sums[0], sum(parts[-2::-1], parts[-1])), "no order shows in these numbers"


def test_a_silent_rank_ends_a_collective():
    first = ProcessGroup(0, 2, "cpu", late=4.0)
    second = ProcessGroup(1, 2, "cpu", first.port, late=4.0)
    thread = threading.Thread(target=second.connect)
    thread.start()
    first.connect()
    thread.join()
    first.hurry()
    with pytest.raises(DeviceFailed, match=r"[Tt]imed out"):
        first.sum(torch.ones(2))


@pytest.mark.parametrize(
    ("changes", "ranks", "named"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "6 heads"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "6 key/value heads"),
        ({"num_heads": 4, "num_kv_heads": 4, "mlp_size": 50}, 4, "50 columns of the MLP"),
        ({"kv_shared_layers": 1, "global_head_size": 16}, 2, "heads_by_layer, kv_shared_layers are not supported"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(changes, ranks, named, tmp_path):
    config = replace(tiny_config(), **changes)
    with pytest.raises(SettingError, match=named):
        check_shards(config, ranks)
    with pytest.raises(SettingError, match=named):  # before the folder is looked at: it is empty
        load_shard(tmp_path, config, torch.float32, ProcessGroup(0, ranks, "cpu"))
