"""Registry of LoRA adapters: those of the setting `adapter`, and those in a folder that is scanned.

The folder is the same for all replicas: each reads it once a second. A folder in it is an adapter under its own name. A removed
adapter is no longer found; calls that have it keep it to their end. A bad adapter is not served, and the log gives the reason.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attend.model.errors import AttendError, SettingError
from attend.model.net.adapters import Adapter

if TYPE_CHECKING:  # it imports torch
    from attend.model.engine.adapters import Adapters

log = logging.getLogger("attend.adapters")

CHECK_SECONDS = 1.0
Seen = tuple[tuple[str, int, int, int], ...]
"""(name, mtime, size, inode) of the files of an adapter folder."""


class AdapterRegistry:
    """Adapters by the names that callers write in `model`."""

    def __init__(
        self,
        reader: "Adapters",
        static_adapters: Mapping[str, Path],
        folder: Path | None = None,
        *,
        most: int,
        reserved_name: str = "",
    ) -> None:
        """Loads all of them. Raises CheckpointError or SettingError where one of `static_adapters`, or the folder itself,
        cannot be read.

        `most`: adapters at a time. `reserved_name`: the model's name, which no adapter may have.
        """
        self._reader, self._folder, self._most, self._reserved_name = reader, folder, most, reserved_name
        self._fixed: dict[str, Adapter] = {}
        self._found: dict[str, tuple[Seen, Adapter | str]] = {}
        """What came of each folder: an adapter, or why it is none."""
        self._faults: dict[str, str] = {}
        """Those that the log has."""
        self._stopping = threading.Event()
        if len(static_adapters) > most:
            raise SettingError(f"adapter names {len(static_adapters)} adapters, but max_adapters is {most}")
        for name, place in static_adapters.items():
            self._fixed[name] = self._load_adapter(name, place)
        self._adapters: Mapping[str, Adapter] = self._fixed
        if folder is not None and not folder.is_dir():
            raise SettingError(f"adapters_folder is {str(folder)!r}, which is not a folder")
        self.look()

    @property
    def names(self) -> list[str]:
        """The names that are served now."""
        return list(self._adapters)

    def get(self, name: str) -> Adapter | None:
        """The adapter of this name; None where there is none. The caller may keep it after it is removed from here."""
        return self._adapters.get(name)

    def look(self) -> None:
        """Load new and changed adapters of the folder, and drop removed ones."""
        try:
            faults = self._scan_folder()
        except OSError as error:  # a folder went while it was looked at
            faults = {"": f"{error.filename} cannot be read: {error.strerror}"}
        for name, fault in faults.items() - self._faults.items():
            log.error("the adapter %r is not loaded: %s", name, fault)
        self._faults = faults

    def follow(self) -> None:
        """Read the folder once a second, on a thread, until `close`."""
        if self._folder is not None:
            threading.Thread(target=self._follow, name="attend-adapters", daemon=True).start()

    def close(self) -> None:
        """End the thread that scans the folder of adapters."""
        self._stopping.set()

    def _follow(self) -> None:
        while not self._stopping.wait(CHECK_SECONDS):
            try:
                self.look()
            except Exception:  # an error of any kind must not end the thread
                log.exception("scanning adapters_folder failed")

    def _scan_folder(self) -> dict[str, str]:
        """Load the adapters of the folder; returns the errors, by name."""
        found: dict[str, tuple[Seen, Adapter | str]] = {}
        served: dict[str, Adapter] = {}
        faults: dict[str, str] = {}
        for name, place, seen in self._candidates():
            if len(self._fixed) + len(served) >= self._most:
                faults[name] = f"max_adapters is {self._most}"
                continue
            known = self._found.get(name)
            found[name] = known if known is not None and known[0] == seen else (seen, self._try(name, place))
            what = found[name][1]
            if isinstance(what, str):
                faults[name] = what
            else:
                served[name] = what
        for name in self._adapters.keys() - self._fixed.keys() - served.keys():
            log.info("the adapter %r is no longer served", name)
        self._found = found
        self._adapters = self._fixed | served  # one assignment: others read
        return faults

    def _try(self, name: str, place: Path) -> Adapter | str:
        try:
            adapter = self._load_adapter(name, place)
        except (AttendError, MemoryError) as error:  # any other would end the thread that looks
            return str(error) or "out of memory"
        log.info("the adapter %r is served", name)
        return adapter

    def _candidates(self) -> Iterator[tuple[str, Path, Seen]]:
        """Folders that are there; names that begin with a dot are being written."""
        if self._folder is None:
            return
        for place in sorted(self._folder.iterdir()):
            if place.is_dir() and not place.name.startswith("."):
                stats = [(path.name, path.stat()) for path in sorted(place.iterdir())]
                yield place.name, place, tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in stats)

    def _load_adapter(self, name: str, place: Path) -> Adapter:
        if name == self._reserved_name or (name in self._fixed):
            raise SettingError(f"another has the name {name!r}")
        return self._reader.read(place)
