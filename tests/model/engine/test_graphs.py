"""Recorded steps: a step in a graph is the same step. On the CPU what would be recorded is called instead."""

import pytest
import torch

from attend.model.engine.cuda_recorder import CudaRecorder
from attend.model.engine.graphs import DecodeGraphs, batch_sizes
from attend.model.engine.plan import Plan, ScheduledTokens
from attend.model.engine.request import NO_SCORE, NO_TOKEN_LEFT
from attend.model.engine.runner import ModelRunner
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, Row, TorchBackend
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams
from attend.model.sampling import sample
from attend.model.sampling_plan import Draw, SamplingPlan
from attend.model.transfer import integers
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import ask, given, run, tiny_engine, told

CONFIG = tiny_config(tied_head=False)
BLOCK = 4
LONGEST = 40
MOST = 10
POISON = 9


class Machine:
    """A tiny decoder with a random cache, its graphs, and how often each was recorded and run."""

    def __init__(self):
        self.net, self.backend = tiny_decoder(CONFIG), TorchBackend()
        with torch.no_grad():
            self.net.embedding.tokens.weight[POISON] = torch.nan
        self.cache = KVCache.allocate(CONFIG, 80, BLOCK, torch.float32, "cpu")
        dice = torch.Generator().manual_seed(0)
        for cached in (*self.cache.keys, *self.cache.values):
            cached.normal_(generator=dice)
        self.steps = []
        self.runs = []
        self.graphs = DecodeGraphs(self.net, self.backend, self.cache, LONGEST, MOST, self._record)

    def _record(self, step):
        index = len(self.steps)
        self.steps.append(step)

        def replay():
            self.runs.append(index)
            step()

        return replay

    @torch.inference_mode()
    def plain(self, rows, tokens):
        """Scores of the same step, not recorded."""
        layout = BatchLayout.build(rows, BLOCK, "cpu")
        hidden_TE = self.net(torch.tensor(tokens), layout.positions_T, PagedAttention(self.backend, self.cache, layout))
        return hidden_TE, self.net.logits(hidden_TE)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()


def rows_of(*lengths):
    """Rows of one token that stand at the end of so many, each on pages of its own."""
    blocks = iter(range(1, 100))
    return [Row([next(blocks) for _ in range(-(-length // BLOCK))], length - 1, 1) for length in lengths]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [1, 2, 4, 8]), (8, [1, 2, 4, 8]), (17, [1, 2, 4, 8, 16, 24])]
)
def test_the_sizes_go_up_to_the_first_that_holds_every_batch(most, sizes):
    assert sizes == batch_sizes(most)


def test_the_largest_batches_have_no_graph():
    assert batch_sizes(256) == batch_sizes(4096)
    assert 256 == batch_sizes(4096)[-1]


def test_no_batch_is_filled_up_with_more_than_seven_rows():
    sizes = batch_sizes(256)
    assert all(min(size for size in sizes if size >= batch) - batch <= 7 for batch in range(1, 257))


def test_there_is_one_recording_for_each_size_and_a_step_runs_the_smallest_that_holds_it(machine):
    assert [1, 2, 4, 8, 16] == batch_sizes(MOST)
    assert 5 == len(machine.steps)
    machine.runs.clear()
    for batch in (1, 2, 3, 5, MOST):
        machine.graphs.run(rows_of(*[3] * batch), integers([5] * batch))
    assert [4, 3, 2, 1, 0] == machine.runs, "the largest was recorded first"


@pytest.mark.parametrize("batch", range(1, MOST + 1))
def test_a_recorded_step_is_the_same_step(machine, batch):
    """Whatever the steps before it left in the buffers."""
    machine.graphs.run(rows_of(*[30] * MOST), integers([7] * MOST))
    rows, tokens = rows_of(*[1 + 4 * index % 37 for index in range(batch)]), list(range(20, 20 + batch))
    hidden_TE, logits_TV = machine.plain(rows, tokens)
    done = machine.graphs.run(rows, integers(tokens))
    torch.testing.assert_close(done.hidden_TE, hidden_TE, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(done.logits_TV, logits_TV, atol=1e-5, rtol=1e-5)
    assert logits_TV.argmax(dim=-1).tolist() == done.greedy_T.tolist()


def test_padding_touches_nobodys_pages(machine):
    """Three rows in a graph for four: beside their own slots, only block 0 may change."""
    machine.graphs.run(rows_of(*[30] * MOST), integers([7] * MOST))
    for cached in (*machine.cache.keys, *machine.cache.values):
        cached.normal_()  # or what that step wrote could be written again unseen
    before = [cached.clone() for cached in (*machine.cache.keys, *machine.cache.values)]
    rows = rows_of(9, 2, 30)
    machine.graphs.run(rows, integers([11, 12, 13]))
    own = [row.blocks[row.start // BLOCK] * BLOCK + row.start % BLOCK for row in rows]
    for cached, old in zip((*machine.cache.keys, *machine.cache.values), before, strict=True):
        changed = (cached != old).any(dim=(1, 2)).nonzero().flatten().tolist()
        assert set(own) <= set(changed) <= {*own, *range(BLOCK)}


def test_all_sizes_read_and_write_the_same_memory(machine):
    """Recorded addresses must stay: a step brings its numbers to them, and its results lie there."""
    places = {
        tuple(part.data_ptr() for part in machine.graphs.run(rows_of(*[3] * batch), integers([5] * batch)))
        for batch in (1, 4, 10)
    }
    assert 1 == len(places)


def test_a_row_without_finite_scores_is_its_own_misfortune(machine):
    done = machine.graphs.run(rows_of(5, 6, 7), integers([21, POISON, 22]))
    assert [False, True, False] == done.logits_TV.isnan().any(dim=-1).tolist()
    assert [False, True, False] == (done.greedy_T == -1).tolist()


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        (rows_of(3), True),
        (rows_of(LONGEST), True),
        (rows_of(*[3] * 16), True),
        (rows_of(*[3] * 17), False),
        ([*rows_of(3), Row([5], 0, 2)], False),
        ([Row([*range(1, 12)], LONGEST, 1)], False),
    ],
    ids=["one", "the longest", "a full batch", "too many", "a prompt among them", "too long"],
)
def test_a_graph_runs_only_what_it_was_recorded_for(machine, rows, fits):
    assert fits == machine.graphs.fits(rows)


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ({}, True),
        ({"sampling": SamplingParams(temperature=0.0, top_k=3)}, True),
        ({"sampling": SamplingParams(temperature=0.7)}, False),
        ({"banned_tokens": (2,)}, False),
        ({"decoding": DecodingParams(logit_bias={1: 9.0})}, False),
        ({"mask": torch.zeros(CONFIG.vocab_size, dtype=torch.bool).numpy()}, False),
    ],
    ids=["greedy", "greedy among three", "drawn", "banned", "biased", "masked"],
)
def test_the_best_token_is_taken_only_where_it_is_what_would_be_sampled(machine, changes, best):
    changes = {**changes}
    plan = SamplingPlan(
        changes.pop("sampling", SamplingParams(temperature=0.0)), 3, decoding=changes.pop("decoding", NO_CHANGE)
    )
    draw = Draw(plan, 5, **changes)
    assert best == draw.takes_the_best
    if best:
        done = machine.graphs.run(rows_of(6, 3), integers([21, 22]))
        assert sample(done.logits_TV, [draw, draw]).tolist() == done.greedy_T.tolist()


@pytest.mark.parametrize("banned", [(), tuple(range(CONFIG.vocab_size))], ids=["plain", "all banned"])
def test_who_is_to_blame_is_known_where_the_token_is_drawn(machine, banned):
    """The next step writes to the same memory, before anybody has looked at what this one drew."""
    runner = ModelRunner(machine.net, machine.backend, machine.cache, "cpu", machine.graphs)
    asked = {"sampling": SamplingParams(), "stop_token_ids": frozenset(banned), "min_tokens": 1 if banned else 0}
    bad, good = ask("bad", [POISON], **asked), ask("good", [11], **asked)
    bad.tables = good.tables = [[1]]
    pending = runner.submit(given(Plan((ScheduledTokens(bad, 0, 1),))))
    other = runner.submit(given(Plan((ScheduledTokens(good, 0, 1),))))
    assert {"bad": NO_SCORE} == pending.result().errors
    assert ({"good": NO_TOKEN_LEFT} if banned else {}) == other.result().errors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_recording_repeats_what_it_was_made_of_on_a_gpu():
    given, doubled = torch.zeros(2, 4, device="cuda")
    replay = CudaRecorder()(lambda: doubled.copy_(given * 2))
    for value in (3.0, 5.0):
        given.fill_(value)
        replay()
        assert [2 * value] * 4 == doubled.tolist()


def crowd():
    """Greedy and drawn answers, changed scores, scores that are told, and prompts of which one token is left to compute."""
    sampling = SamplingParams(temperature=0.8, top_k=20)
    return [
        ask("greedy", range(10, 15), 12),
        ask("drawn", range(20, 27), 9, sampling=sampling, seed=5),
        ask("biased", [30], 8, decoding=DecodingParams(repetition_penalty=1.5)),
        ask("told", range(40, 46), 7, logprobs=3, prompt_logprobs=2),
        ask("banned", [50, 51], 6, min_tokens=5, stop_token_ids=frozenset({3, 4})),
        ask("broken", [POISON], 5),
    ]


@pytest.mark.parametrize("has_scores", [True, False], ids=["scores", "hidden states alone"])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_an_engine_with_graphs_answers_as_one_without(budget, has_scores):
    """In float32, whatever else is in the batch; and only steps of one token a request are computed by graphs."""
    net = tiny_decoder(CONFIG)
    with torch.no_grad():
        net.embedding.tokens.weight[POISON] = torch.nan
    plain, recorded = (tiny_engine(net, max_batch_tokens=budget) for _ in range(2))
    runner, sizes = recorded.runner, []

    def record(step):
        return lambda: (sizes.append(None), step())

    runner.graphs = DecodeGraphs(net, runner.backend, runner.cache, 64, 8, record, scores=has_scores)
    ours, theirs = run(recorded, crowd()), run(plain, crowd())
    assert {name: told(outputs) for name, outputs in theirs.items()} == {name: told(outputs) for name, outputs in ours.items()}
    assert scores(theirs["told"]) == pytest.approx(scores(ours["told"]), abs=1e-4)
    assert ours["broken"][-1].error
    assert len(sizes) >= 5


def scores(outputs):
    """Every log probability that an answer told."""
    tokens = [token for output in outputs for token in (*output.prompt_logprobs, *output.logprobs)]
    return [value for token in tokens for value in (token.logprob, *(score for _, score in token.top))]
