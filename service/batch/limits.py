"""Quotas and limits of files and batches, from the settings."""

from dataclasses import dataclass
from pathlib import Path

from attend.service.settings import Settings

BESIDE = 8
"""Of the lines that are computed at a time, one of so many goes on beside other calls."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    folder: Path
    total_bytes: int = 10 << 30
    key_bytes: int = 2 << 30
    file_bytes: int = 200 << 20
    key_files: int = 1000
    lines: int = 50_000
    concurrency: int = 16
    retention: float = 168 * 3600.0

    @property
    def beside_others(self) -> int:
        """Lines that are computed at a time beside other calls."""
        return max(1, self.concurrency // BESIDE)


def limits_of(settings: Settings, max_batch_requests: int) -> Limits:
    """The limits of a replica with such a batch."""
    return Limits(
        Path(settings.batch_folder),
        settings.batch_bytes,
        settings.batch_key_bytes,
        settings.batch_file_bytes,
        settings.batch_key_files,
        settings.batch_lines,
        settings.batch_concurrency or max(1, max_batch_requests // 4),
        settings.batch_retention_hours * 3600,
    )
