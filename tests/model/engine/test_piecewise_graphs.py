"""Steps that are recorded in pieces are the same steps. On the CPU what would be recorded is called instead."""

import pytest
import torch

from attend.model.engine.cuda_recorder import CudaRecorder
from attend.model.engine.piecewise_graphs import PiecewiseGraphs, token_sizes
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, Row, TorchBackend
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import run, tiny_engine, told
from tests.model.engine.test_graphs import crowd, scores

BLOCK, MOST, POISON = 4, 60, 9
FAMILIES = {
    "plain": {},
    "windows": {"sliding_window": 6, "window_layers": (1,)},
    "sinks": {"sinks": True},
    "learned positions": {"positions": "learned"},
    "gated": {"attention_gate": True},
}
STEPS = {
    "a prompt": [(0, 17)],
    "streams and prompts": [(6, 1), (30, 1), (0, 5), (8, 13)],
    "guesses": [(11, 3), (2, 4)],
    "a whole size": [(0, 1), (0, 31)],
    "the most": [(3, 1), (0, 30), (1, 29)],
}


class Machine:
    """A tiny decoder with a random cache, and how often a step of each size was recorded and run."""

    def __init__(self, **changes):
        self.config = tiny_config(tied_head=False, **changes)
        self.net, self.backend = tiny_decoder(self.config), TorchBackend(self.config.attention_variants)
        self.cache = KVCache.allocate(self.config, 80, BLOCK, torch.float32, "cpu")
        dice = torch.Generator().manual_seed(0)
        for cached in (*self.cache.keys, *self.cache.values):
            cached.normal_(generator=dice)
        self.recorded, self.runs = [], []
        self.pieces = PiecewiseGraphs(self.net, self.backend, self.cache, MOST, self._record)

    def _record(self, step):
        layers = []
        step(lambda layer, *_: layers.append(layer))
        assert layers == list(range(self.config.num_layers)), "each layer's attention is between two pieces"
        index = len(self.recorded)
        self.recorded.append(step)

        def replay(between):
            self.runs.append(index)
            step(between)

        return replay

    def rows(self, step):
        """Rows that begin at a position with so many tokens, and their tables in other groups: all on pages of their own."""
        blocks, rows = iter(range(1, 40)), []
        for start, count in step:
            rows.append(Row([next(blocks) for _ in range(-(-(start + count) // BLOCK))], start, count))
        others = [[[block + 40 for block in row.blocks] for row in rows]] * (self.cache.num_groups - 1)
        return rows, others

    def own_slots(self, layer, rows, others):
        """The slots of the rows' tokens in a layer's cache."""
        tables = ([row.blocks for row in rows], *others)[self.cache.group_of_layer[layer]]
        reach = [(table, at) for table, row in zip(tables, rows, strict=True) for at in range(row.start, row.start + row.count)]
        return [table[at // BLOCK] * BLOCK + at % BLOCK for table, at in reach]

    @torch.inference_mode()
    def plain(self, rows, tokens, others):
        """Hidden states of the same step, not recorded."""
        layout = BatchLayout.build(rows, BLOCK, "cpu", others)
        return self.net(torch.tensor(tokens), layout.positions_T, PagedAttention(self.backend, self.cache, layout))


@pytest.fixture(scope="module", params=FAMILIES)
def machine(request) -> Machine:
    return Machine(**FAMILIES[request.param])


@pytest.mark.parametrize(("most", "sizes"), [(1, [16]), (17, [16, 32]), (64, [16, 32, 64]), (129, [16, 32, 64, 128, 192])])
def test_the_sizes_go_up_to_the_first_that_holds_every_step(most, sizes):
    assert sizes == token_sizes(most)


def test_no_step_of_more_than_64_tokens_is_filled_up_with_64():
    sizes = token_sizes(8192)
    assert 512 == sizes[-1]
    assert all(min(size for size in sizes if size >= tokens) - tokens < 64 for tokens in range(65, 513))


def test_the_largest_is_recorded_first_and_a_step_runs_the_smallest_that_holds_it(machine):
    assert 3 == len(machine.recorded)
    machine.runs.clear()
    for count in (2, 16, 17, 33, 60):
        rows, others = machine.rows([(0, count)])
        machine.pieces.run(rows, torch.tensor([5] * count), others)
    assert [2, 2, 1, 0, 0] == machine.runs


@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_pieces_is_the_same_step(machine, name):
    """Whatever the steps before it left in the buffers."""
    full, full_others = machine.rows([(0, 60)])
    machine.pieces.run(full, torch.tensor([7] * 60), full_others)
    rows, others = machine.rows(STEPS[name])
    tokens = [20 + at % 40 for at in range(sum(row.count for row in rows))]
    expected = machine.plain(rows, tokens, others).clone()
    cached = [part.clone() for part in (*machine.cache.keys, *machine.cache.values)]
    for layer in range(machine.config.num_layers):
        own = machine.own_slots(layer, rows, others)
        machine.cache.keys[layer][own] = machine.cache.values[layer][own] = torch.nan  # what the step itself must write
    found = machine.pieces.run(rows, torch.tensor(tokens), others)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for part, before in zip((*machine.cache.keys, *machine.cache.values), cached, strict=True):
        torch.testing.assert_close(part[BLOCK:], before[BLOCK:], atol=1e-5, rtol=1e-5)


def test_all_sizes_read_and_write_the_same_memory(machine):
    places = set()
    for count in (3, 30, 60):
        rows, others = machine.rows([(0, count)])
        places.add(machine.pieces.run(rows, torch.tensor([5] * count), others).data_ptr())
    assert 1 == len(places)


@pytest.mark.parametrize(("step", "fits"), [([(0, 64)], True), ([(0, 65)], False), ([(0, 1)] * 40 + [(0, 24)], True)])
def test_pieces_take_only_as_many_tokens_as_were_recorded(machine, step, fits):
    assert fits == machine.pieces.fits([Row([1], *each) for each in step])


@pytest.mark.parametrize("budget", [3, 20, 64])
def test_an_engine_with_pieces_answers_as_one_without(budget):
    """In float32, whatever else is in the batch; prompts, streams alone, log probabilities of prompts, and who fails."""
    net = tiny_decoder(tiny_config(tied_head=False))
    with torch.no_grad():
        net.embedding.tokens.weight[POISON] = torch.nan
    plain, recorded = (tiny_engine(net, max_batch_tokens=budget) for _ in range(2))
    runner, runs = recorded.runner, []

    def record(step):
        return lambda between: (runs.append(None), step(between))

    runner.pieces = PiecewiseGraphs(net, runner.backend, runner.cache, budget, record)
    ours, theirs = run(recorded, crowd()), run(plain, crowd())
    assert {name: told(outputs) for name, outputs in theirs.items()} == {name: told(outputs) for name, outputs in ours.items()}
    assert scores(theirs["told"]) == pytest.approx(scores(ours["told"]), abs=1e-4)
    assert ours["broken"][-1].error
    assert len(runs) >= 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_recorded_pieces_repeat_what_they_were_made_of_with_what_is_done_between_them_on_a_gpu():
    """What one piece leaves to the next holds, whatever is allocated between them."""
    given, doubled = torch.zeros(2, 4, device="cuda")

    def step(between):
        kept = given * 2
        doubled.copy_(kept)
        between(3.0)
        doubled.mul_(2).add_(kept)
        between(5.0)
        doubled.add_(1)

    def between(number):
        torch.empty(1 << 20, device="cuda").fill_(torch.nan)
        doubled.add_(number)

    replay = CudaRecorder().in_pieces(step)
    for value in (1.0, 2.0):
        given.fill_(value)
        replay(between)
        assert [(2 * value + 3) * 2 + 2 * value + 5 + 1] * 4 == doubled.tolist()
