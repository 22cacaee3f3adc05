"""Tables that stay on the device are those of the requests, in any life of an engine; what a step sends does not grow with
the texts.
"""

import random
from array import array

import torch

from attend.model.engine.device_tables import TableLines
from attend.model.engine.tables import BlockTables
from attend.model.net.paged_attention import BatchLayout, Row
from tests.model.engine.machines import ask, sizes
from tests.simulation.life import Life

WIDTH = 64
LIVES = 40


class Watched:
    """Looks at the steps of a life: of most of them the tables go to the device too, and must be what `BatchLayout` makes."""

    def __init__(self, life: Life, seed: int) -> None:
        config = life.setting.config
        self.dice = random.Random(seed)
        self.num_groups = len(config.groups) - any(group.has_state for group in config.groups)
        self.block_size = config.block_size
        self.lines = TableLines(self.num_groups, config.max_batch_requests, WIDTH, "cpu")
        self.lines.tables_GLB[:, :-1] = -5  # what is left of steps that nobody knows
        self.lines.forget()
        self.num_sent = self.num_entries = 0
        submitted = life.check_submitted

        def check_submitted(step):
            submitted(step)
            if step.counts and self.dice.random() < 0.9:  # another step is not recorded
                self.check(step)

        life.check_submitted = check_submitted

    def check(self, step):
        tables = step.tables[: self.num_groups]
        news = self.lines.news(tables, step.versions)
        assert len(set(news.places)) == len(news.places) == len(news.values)
        flat = self.lines.tables_GLB.view(-1)
        flat[torch.tensor(news.places, dtype=torch.int64)] = torch.tensor(news.values, dtype=torch.int64)
        order = sorted(range(len(step.counts)), key=lambda row: step.counts[row] != 1)
        rows = [Row(tables[0][row], step.starts[row], step.counts[row]) for row in order]
        layout = BatchLayout.build(rows, self.block_size, "cpu", [[of[row] for row in order] for of in tables[1:]])
        for group in range(self.num_groups):
            wanted = layout.of(group).block_table_RB
            found = self.lines.tables_GLB[group, [news.lines[row] for row in order]]
            assert torch.equal(wanted, found[:, : wanted.shape[1]]), f"group {group}"
        assert not self.lines.tables_GLB[:, -1].any(), "the line of padding is written"
        self.num_sent += len(news.places)
        self.num_entries += sum(len(table) for of in tables for table in of)


def test_lines_hold_the_tables_of_every_step_of_every_life():
    """Rows join, leave and move; requests are preempted, share prefixes and give back blocks; steps raise, or come early."""
    sent = entries = preemptions = hits = 0
    for seed in range(LIVES):
        life = Life(seed)
        watched = Watched(life, seed)
        life.run()
        sent, entries = sent + watched.num_sent, entries + watched.num_entries
        preemptions, hits = preemptions + life.scheduler.num_preemptions, hits + life.scheduler.num_prefix_hits
    assert preemptions > LIVES < hits
    assert sent < entries, "as much is sent as there is"


def test_a_version_ends_where_a_table_changes_but_at_its_end_or_from_its_beginning():
    """At an admission, a prefix that is shared later, and a restart; not where a request grows."""
    tables, requests = BlockTables(sizes(prefix_caching=True, block_size=2, max_batch_tokens=64)), []
    for name in ("first", "second"):
        request = ask(name, range(12))
        request.tables = tables.new()
        assert tables.admit(request)
        requests.append(request)
    first, second = requests
    seen = [first.version, second.version]
    assert tables.grow(second, 16)
    assert [first.version, second.version] == seen
    tables.remember(first, 8)
    tables.skip_known(second)
    assert first.tables[0][:4] == second.tables[0][:4]
    seen.append(second.version)
    tables.restart(second)
    seen.append(second.version)
    tables.free(second)
    assert tables.admit(second)
    seen.append(second.version)
    assert 5 == len({*seen} - {0})


def new_of(lines, tables, versions):
    news = lines.news([tables], versions)
    return list(news.places), list(news.values)


def test_a_step_sends_new_blocks_alone_however_long_the_texts_are():
    for length in (10, 10_000):
        lines, tables = TableLines(1, 4, 20_000, "cpu"), [array("q", range(1, length + 1)) for _ in range(3)]
        assert 3 * length == len(new_of(lines, tables, [7, 8, 9])[0]), "the first time all of it"
        assert ([], []) == new_of(lines, tables, [7, 8, 9])
        tables[1].append(77)
        lines_before = lines.news([tables], [7, 8, 9]).lines
        assert ([], []) == new_of(lines, [tables[2], tables[1]], [9, 8])
        tables[2].extend([5, 6])
        tables[2][0] = 0  # it went back
        moved = lines.news([[tables[2], tables[0]]], [9, 7])
        assert [lines_before[2], lines_before[0]] == list(moved.lines), "rows move, and their lines do not"
        assert [5, 6, 0] == list(moved.values)


def test_a_table_without_a_version_is_sent_each_time():
    lines, tables = TableLines(1, 2, 4, "cpu"), [array("q", [1, 2]), array("q", [3])]
    for _ in range(3):
        assert [1, 2] == new_of(lines, tables, [0, 5])[1][:2]


def test_what_was_forgotten_is_sent_again_with_noughts_over_whatever_was_there():
    lines, tables = TableLines(1, 1, 4, "cpu"), [array("q", [1, 2])]
    lines.news([tables], [3])
    lines.forget()
    assert [1, 2, 0, 0] == new_of(lines, tables, [3])[1]


def test_a_new_table_takes_the_line_of_the_one_that_was_used_longest_ago():
    lines, one = TableLines(1, 2, 4, "cpu"), array("q", [1])
    lines.news([[one, one]], [1, 2])
    lines.news([[one]], [1])
    assert [0] == list(lines.news([[one]], [1]).lines)
    assert [1] == list(lines.news([[one]], [3]).lines)
    assert [0] == list(lines.news([[one]], [1]).lines)
