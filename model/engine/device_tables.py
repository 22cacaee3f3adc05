"""The block tables of running requests, kept on the device: a step sends what is new in them, however long the texts are.

A request's table has a line. A step names the line of each of its rows, in any order, so nothing moves when a request ends.
A table is known by its version: as long as that is the same, blocks only come at its end, or become 0 from its beginning on.

Shapes: G groups of layers · L lines · B blocks of a request.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

Tables = Sequence[Sequence[Sequence[int]]]
"""[G][R]: the block tables of a step's rows in each group of layers."""


class News(NamedTuple):
    """Entries of a step's block tables that the device does not have yet."""

    lines: "array[int]"
    """[R]: for each request of the step its line in `tables_GLB`."""
    places: "array[int]"
    """Flat indices into `tables_GLB`, each of them once."""
    values: "array[int]"
    """The block numbers to write at `places`, int64."""


class TableLines:
    """Tables on the device, and what was sent of each."""

    def __init__(self, num_groups: int, num_lines: int, width: int, device: str | torch.device) -> None:
        self.tables_GLB = torch.zeros(num_groups, num_lines + 1, width, dtype=torch.int64, device=device)
        """Block tables on the device, 0 behind their ends. The last line belongs to no request: it stays 0."""
        self.padding = num_lines
        self._width = width
        self._lengths, self._zeros = ([[0] * num_lines for _ in range(num_groups)] for _ in range(2))
        self._line_of: dict[int, int] = {}
        self._free = list(reversed(range(num_lines)))

    def forget(self) -> None:
        """Know no table any more, as after a step of which nobody knows what it has written."""
        self._line_of.clear()
        self._free = list(reversed(range(self.padding)))
        for lengths in self._lengths:
            lengths[:] = [self._width] * self.padding  # until it is written, a line may hold anything

    def news(self, tables: Tables, versions: Sequence[int]) -> News:
        """Take lines for the rows. What is returned counts as written: see `forget` for where it is not.

        There are at least as many lines as rows. The version 0 says nothing: its table is sent whole.
        """
        line_of, found = self._line_of, News(array("q"), array("q"), array("q"))
        names = [version or -1 - row for row, version in enumerate(versions)]
        known = {name for name in names if name in line_of}
        for name in known:
            line_of[name] = line_of.pop(name)  # to the end, so that no new one takes its line
        for row, name in enumerate(names):
            line = line_of[name] if name in known else self._take_line(name)
            found.lines.append(line)
            for group, of_group in enumerate(tables):
                if name < 0 or name not in known:
                    self._send(found, group, line, of_group[row])
                else:
                    self._send_new(found, group, line, of_group[row])
        return found

    def _take_line(self, name: int) -> int:
        """A line for a new table: a free one, or that of the table that was used longest ago."""
        line = self._free.pop() if self._free else self._line_of.pop(next(iter(self._line_of)))
        self._line_of[name] = line
        return line

    def _send(self, found: News, group: int, line: int, table: Sequence[int]) -> None:
        end, old, begin = min(len(table), self._width), self._lengths[group][line], self._begin(group, line)
        found.places.extend(range(begin, begin + max(end, old)))
        found.values.extend(table[:end])
        found.values.extend([0] * (old - end))
        self._lengths[group][line], self._zeros[group][line] = end, 0

    def _send_new(self, found: News, group: int, line: int, table: Sequence[int]) -> None:
        """The blocks at its end, and the zeros behind those at its beginning."""
        end, old, zeros = min(len(table), self._width), self._lengths[group][line], self._zeros[group][line]
        if end > old:
            begin = self._begin(group, line)
            found.places.extend(range(begin + old, begin + end))
            found.values.extend(table[old:end])
            self._lengths[group][line] = end
        if zeros < old and not table[zeros]:
            begin = self._begin(group, line)
            while zeros < old and not table[zeros]:
                found.places.append(begin + zeros)
                found.values.append(0)
                zeros += 1
            self._zeros[group][line] = zeros

    def _begin(self, group: int, line: int) -> int:
        return (group * (self.padding + 1) + line) * self._width
