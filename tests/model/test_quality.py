"""Quality of a form: what a text costs it, and how far its probabilities are from another's, each position counted once."""

import math
from itertools import pairwise
from statistics import pstdev

import pytest
import torch

from attend.model import quality
from attend.model.quality import compare, overlapping_windows

VOCAB = 7


class Table:
    """A model whose scores depend on the last token alone."""

    vocab_size = VOCAB

    def __init__(self, scores_VV):
        self.scores_VV = scores_VV
        self.read_windows = []

    def read(self, tokens, first):
        self.read_windows.append((tuple(tokens), first))
        scores_TV = self.scores_VV[torch.tensor(tokens)][first:]
        return lambda begin, end: scores_TV[begin:end]


def table(seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


TOKENS = torch.randint(VOCAB, (43,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("context", [2, 8, 9, 42, 100])
def test_sums_are_those_of_the_definition_over_all_positions_but_the_first(monkeypatch, context, at_once):
    monkeypatch.setattr(quality, "SCORES", at_once * VOCAB)
    wanted, given = table(0), table(1)
    first, found = compare([Table(wanted), Table(given)], TOKENS, context)
    nats = divergence = agreed = 0.0
    more = []
    for last, target in pairwise(TOKENS):
        p, q = (scores[last].double().softmax(-1) for scores in (wanted, given))
        nats -= q[target].log().item()
        more.append((p[target] / q[target]).log().item())
        divergence += sum((a * (a.log() - b.log())).item() for a, b in zip(p, q, strict=True))
        agreed += int(p.argmax() == q.argmax())
    assert (found.positions, found.agreed) == (len(TOKENS) - 1, agreed)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.divergence == pytest.approx(divergence, rel=1e-6)
    assert found.uncertainty(first) == pytest.approx(pstdev(more) * math.sqrt(len(more)), rel=1e-4)
    assert first.uncertainty(first) == 0.0
    assert found.bits_per_byte(100) == pytest.approx(nats / math.log(2) / 100, rel=1e-6)


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 10, 50])
@pytest.mark.parametrize("context", [2, 8, 9])
def test_each_token_but_the_first_is_scored_once_with_half_a_window_before_it(context, num_tokens):
    scored = []
    for window in overlapping_windows(num_tokens, context):
        assert 0 <= window.start < window.first_scored < window.stop <= num_tokens
        assert window.stop - 1 - window.start == min(context, num_tokens - 1)
        assert window.first_scored - window.start >= min(window.first_scored, context // 2)
        scored += range(window.first_scored, window.stop)
    assert scored == list(range(1, num_tokens))


def test_forms_read_the_same_windows_and_report_how_far_they_are():
    forms, told = [Table(table(0)), Table(table(1))], []
    compare(forms, TOKENS, 8, told.append)
    assert forms[0].read_windows == forms[1].read_windows
    assert told == [window.stop for window in overlapping_windows(len(TOKENS), 8)]
