"""A sign of life from inside a step: how others tell a long step from one that stands still."""

import ctypes


class Pulse:
    """A count that goes up with each layer that a step has computed. One thread computes; any may look."""

    def __init__(self) -> None:
        self._count = ctypes.c_int64()
        self.address = ctypes.addressof(self._count)
        """Where native code counts, without the interpreter. As long as this object lives."""

    @property
    def count(self) -> int:
        """How often the step thread has said that it has come further."""
        return self._count.value

    def beat(self) -> None:
        """Say that the step has come further."""
        self._count.value += 1
