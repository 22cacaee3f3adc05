"""A heartbeat from inside a step, which tells a slow step from one that hangs."""

import ctypes


class ProgressCounter:
    """A count that goes up with each layer that a step has computed. One thread computes; any may look."""

    def __init__(self) -> None:
        self._count = ctypes.c_int64()
        self.address = ctypes.addressof(self._count)
        """Address of the counter that native code increments, valid as long as this object."""

    @property
    def count(self) -> int:
        """How often the step thread has said that it has come further."""
        return self._count.value

    def beat(self) -> None:
        """Say that the step has come further."""
        self._count.value += 1
