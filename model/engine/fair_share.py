"""Fair scheduling among owners by virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models").

The counter of an owner has the tokens that steps have computed for its requests, over its weight. Who has the lowest counter
goes first: into the batch, and with a part of a prompt. An owner without requests in flight has no counter, and begins with the
lowest of those that have one: nobody saves up turns. Virtual arrivals order the requests of one owner alone.

On a CPU a step takes longer the more streams it has. So an owner who has more streams than any other is left out in part: a
step takes at most MAX_SLOWED times as long as one in which he has no more than the owner after him, over their weights.
Background requests are left out whenever others run.

A prompt has room for all of its tokens from its admission on. A stream that needs more takes it from the youngest request of
the owner who holds most; where no owner has two, from the youngest of all. So the oldest request always advances.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter

from attend.model.engine.budget import StepCost
from attend.model.engine.plan import ScheduledTokens
from attend.model.engine.request import Request

Owner = str | None
TOKENS = attrgetter("num_tokens")
LEFT_OUT = attrgetter("num_left_out")
MAX_SLOWED = 1.5
WHOLE_EVERY = 8
"""One in so many steps has all streams: what they cost is learned from steps that differ."""
MAX_BEHIND = 0.25
"""Streams in the background may take so much of the time of the others, over WHOLE_EVERY steps; one advances in any case."""
MAX_PASSED_SECONDS = 10.0
"""Requests of other owners may pass one that finds no room for so long."""


@dataclass(slots=True)
class _Account:
    """An owner with requests in flight."""

    weight: float
    token_counter: float
    """Tokens computed for it, over its weight."""
    num_requests: int = 0
    shortest_next: bool = False
    """True if its shortest prompt goes first in the next step, and not the oldest."""


class FairShare:
    """The owners of the requests in flight."""

    def __init__(self) -> None:
        self._accounts: dict[Owner, _Account] = {}
        self._num_steps = 0

    @property
    def is_shared(self) -> bool:
        """True if there is more than one owner."""
        return len(self._accounts) > 1

    def enter(self, request: Request) -> None:
        """Count a request that is in flight for its owner."""
        account = self._accounts.get(request.owner)
        if account is None:
            lowest = min((each.token_counter for each in self._accounts.values()), default=0.0)
            account = self._accounts[request.owner] = _Account(request.weight, lowest)
        account.weight = request.weight
        account.num_requests += 1

    def leave(self, request: Request) -> None:
        """Take a request that has ended from its owner."""
        account = self._accounts[request.owner]
        account.num_requests -= 1
        if not account.num_requests:
            del self._accounts[request.owner]

    def charge(self, items: Iterable[ScheduledTokens]) -> None:
        """A step will compute these tokens."""
        for item in items if self.is_shared else ():
            account = self._accounts[item.request.owner]
            account.token_counter += item.count / account.weight

    def select_streams(self, running: Sequence[Request], cost: StepCost) -> Sequence[Request]:
        """`running` without the streams that the next step leaves out, so that the streams of other owners go on faster."""
        left_out = self._left_out(running, cost)
        return [request for request in running if request not in left_out] if left_out else running

    def _left_out(self, running: Sequence[Request], cost: StepCost) -> Set[Request]:
        self._num_steps += 1
        if not self.is_shared or not cost.stream_seconds:
            return frozenset()
        is_whole = not self._num_steps % WHOLE_EVERY
        behind = self._behind(running, cost, is_whole=is_whole)
        if is_whole:
            return behind
        streams = dict[Owner, list[Request]]()
        for request in running:
            if request.is_stream and request not in behind:
                streams.setdefault(request.owner, []).append(request)
        if len(streams) < 2:
            return behind
        share = {owner: len(own) / self._accounts[owner].weight for owner, own in streams.items()}
        most, after = sorted(streams, key=share.__getitem__, reverse=True)[:2]
        own = streams[most]
        fair = math.ceil(share[after] * self._accounts[most].weight)
        others = sum(map(len, streams.values())) - len(own)
        more = int((MAX_SLOWED - 1) * (fair + others + cost.fixed_seconds / cost.stream_seconds))
        resting = sorted(own, key=LEFT_OUT)[: max(0, len(own) - fair - more)]
        for request in resting:
            request.num_left_out += 1
        return behind | {*resting}

    def _behind(self, running: Sequence[Request], cost: StepCost, *, is_whole: bool) -> frozenset[Request]:
        """The requests in the background that are left out for others: all, or in a step with all streams all but a few."""
        behind = [request for request in running if request.is_background]
        others = len(running) - len(behind)
        if not others:
            return frozenset()
        if is_whole:
            few = max(1, int(WHOLE_EVERY * MAX_BEHIND * (others + cost.fixed_seconds / cost.stream_seconds)))
            behind = sorted(behind, key=LEFT_OUT)[: max(0, len(behind) - few)]
        for request in behind:
            request.num_left_out += 1
        return frozenset(behind)

    def next(self, waiting: Sequence[Request], running: Iterable[Request]) -> Request:
        """Who of those that wait, in the order of their virtual arrivals, goes into the batch first."""
        return self._heads(waiting, running)[0] if self.is_shared else waiting[0]

    def newcomers(self, waiting: Iterable[Request], running: Iterable[Request]) -> list[Request]:
        """The first request of each owner of whom none runs, where there are others."""
        if not self.is_shared:
            return []
        run = {request.owner for request in running}
        return self._heads((request for request in waiting if request.owner not in run), ())

    def _heads(self, waiting: Iterable[Request], running: Iterable[Request]) -> list[Request]:
        """The first request of each owner, the lowest counters first; of two equal ones who has fewer that run."""
        first: dict[Owner, Request] = {}
        for request in waiting:
            first.setdefault(request.owner, request)
        return sorted(first.values(), key=self._turn(running))

    def _turn(self, running: Iterable[Request]) -> Callable[[Request], tuple[float, int]]:
        counts = Counter(request.owner for request in running)
        return lambda request: (self._accounts[request.owner].token_counter, counts[request.owner])

    def in_turns(self, prompts: Sequence[Request], running: Iterable[Request]) -> list[Request]:
        """Prompts, the oldest first, as they share a step: the first of each owner, then the second of each, ...

        Of one owner the oldest goes first and the shortest by turns.
        """
        of_owners: dict[Owner, list[Request]] = {}
        for request in prompts:
            of_owners.setdefault(request.owner, []).append(request)
        for owner, own in of_owners.items():
            if self._accounts[owner].shortest_next:
                own.sort(key=lambda request: request.num_tokens - request.num_computed)
        if len(of_owners) == 1:
            return own
        turn = self._turn(running)
        order = sorted(of_owners.values(), key=lambda own: turn(own[0]))
        return [request for row in zip_longest(*order) for request in row if request is not None]

    def turn(self, first: Request, items: Sequence[ScheduledTokens]) -> None:
        """A step will compute these parts of prompts; `first` was to be the first."""
        self.charge(items)
        for owner in {first.owner, *(item.request.owner for item in items)}:
            account = self._accounts[owner]
            account.shortest_next = not account.shortest_next

    def victim(
        self, running: Sequence[Request], size: Callable[[Request], float] = TOKENS, above: float = 0.0
    ) -> Request | None:
        """The youngest request of the owner whose requests are the largest together, over its weight. None where no owner has
        two that run and are larger than `above` together. `running` is in that order.
        """
        counts, sizes = Counter[Owner](), dict[Owner, float]()
        for request in running:
            counts[request.owner] += 1
            sizes[request.owner] = sizes.get(request.owner, 0.0) + size(request) / self._accounts[request.owner].weight
        largest = max((owner for owner, count in counts.items() if count > 1), key=sizes.__getitem__, default=None)
        if counts[largest] < 2 or sizes[largest] <= above:
            return None
        return next(request for request in reversed(running) if request.owner == largest)

    def gives_way(self, request: Request, running: Sequence[Request], is_full: bool) -> Request | None:
        """Who is preempted for a newcomer: of an owner who has more than it asks for, of requests where the batch `is_full`,
        else of tokens. Nobody is preempted for it a second time.
        """
        if request.was_newcomer:
            return None
        if is_full:
            return self.victim(running, lambda each: 1.0, above=1 / request.weight)
        return self.victim(running, above=request.num_tokens / request.weight)
