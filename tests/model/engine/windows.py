"""A fake model with windows and states: its tokens are right only where each group of layers kept what its queries see."""

import random
from dataclasses import replace
from typing import NamedTuple

from attend.model.engine.config import EngineConfig, GroupSize
from attend.model.engine.plan import StepInput
from tests.model.engine.machines import Done, FakeRunner, Tables

WINDOWS: list[tuple[int | None, ...]] = [(None, 5), (4,), (None, 2, 7), (12,), (None, 3), (9, 3)]
"""Of the groups of a model; None: full attention."""


class Seen(NamedTuple):
    """What a layer keeps of a token: the token, and what it saw before it."""

    digest: int
    """Of the text up to here; -1 where something that the token sees was not there."""
    token: int
    before: "Seen | None"


class GroupsRunner(FakeRunner):
    """Computes each token from what every group keeps of the tokens before it, as far as its window goes."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.block_size)
        self.groups = config.groups
        self.kept: dict[tuple[int, int], Seen] = {}
        """By group and slot."""
        self.states: dict[tuple[int, int], tuple[int, int]] = {}
        """By group and slot: how many tokens a state has seen, and their digest."""
        self.passed: dict[tuple[int, int], dict[int, int]] = {}
        """By group and slot: the digest after each token of the last step that wrote it, and of its draft."""
        self.states_before = self.states
        """As the step found them: its rows are computed side by side."""

    def submit(self, step: StepInput) -> Done:
        self.states_before = dict(self.states)
        return super().submit(step)

    def write(self, tables: Tables, start: int, tokens: list[int], kept: int) -> None:
        for at, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            if group.has_state:
                assert 1 <= len(table) <= 2, "a state is read in one slot and written to one"
                self._fold(at, table, start, tokens, kept)
            else:
                for position, token in enumerate(tokens, start):
                    self._compute(at, table, position, token)

    def _compute(self, at: int, table: list[int], position: int, token: int) -> None:
        window = self.groups[at].window or 2  # under full attention `read` looks at the rest
        *seen, place = self.places(table, max(0, position + 1 - window), position + 1)
        assert place >= self.block_size, "a token is written to the reserved block"
        before = self.kept.get((at, self.places(table, position - 1, position)[0])) if position else None
        good = (position == 0 or before is not None) and self._follow(at, seen, before)
        digest = hash((0 if before is None else before.digest, token)) if good else -1
        self.kept[at, place] = Seen(digest, token, before)

    def _follow(self, at: int, places: list[int], last: Seen | None) -> bool:
        """True if the slots have the tokens that came before the one in the last of them, each with all that it saw."""
        for place in reversed(places):
            kept = self.kept.get((at, place))
            if last is None or kept is None or kept.digest != last.digest:
                return False
            last = last.before
        return True

    def _fold(self, at: int, table: list[int], start: int, tokens: list[int], kept: int) -> None:
        count, digest = (0, 0) if start == 0 else self.states_before.get((at, table[0]), (0, 0))
        passed = self.passed[at, table[-1]] = {}
        for end, token in enumerate(tokens, start + 1):
            digest = hash((digest, token))
            passed[end] = digest if count == start else -1
        self.states[at, table[-1]] = (start + kept, passed[start + kept])

    def read(self, tables: Tables, end: int, early: bool) -> list[int]:
        """The tokens before `end`; with a wrong last one where a group does not have what it should."""
        tokens, kept = [], self.kept.get((0, self.places(tables[0], end - 1, end)[0]))
        while kept is not None:
            tokens.append(kept.token)
            kept = kept.before
        tokens.reverse()
        digest = 0
        for token in tokens:
            digest = hash((digest, token))
        if len(tokens) == end and all(self._digest(at, table, end) == digest for at, table in enumerate(tables)):
            return tokens
        return [*[0] * (end - 1), -1]

    def _digest(self, at: int, table: list[int], end: int) -> int:
        if self.groups[at].has_state:
            return self.passed[at, table[-1]][end]
        places = self.places(table, 0 if self.groups[at].window is None else end - 1, end)
        kept = self.kept.get((at, places[-1]))
        return kept.digest if kept is not None and self._follow(at, places, kept) else -1


def with_groups(config: EngineConfig, dice: random.Random, *, states: bool = False) -> EngineConfig:
    """The same engine for a model with windows, which have little more room than one request and one step need."""
    windows = dice.choice(WINDOWS)
    if states:
        config = replace(config, num_snapshots=dice.randint(0, 6))
    groups = []
    for window in windows:
        least = config.window_blocks(window or 1) + config.step_blocks
        groups.append(GroupSize(config.num_blocks if window is None else least + dice.randint(0, 5), window))
    longest = config.max_model_len if windows[0] is None else dice.randint(config.max_model_len, max(config.max_model_len, 40))
    if states:
        groups.append(GroupSize(config.max_batch_requests + config.num_snapshots, has_state=True))
    return replace(config, max_model_len=longest, num_blocks=groups[0].num_blocks, groups=tuple(groups))
