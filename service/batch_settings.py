"""The settings of files and batches."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from attend.service.values import size_in_bytes

Bytes = Annotated[int, Field(ge=1), BeforeValidator(size_in_bytes)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]

BATCH_FOLDER = "batch_folder"
FOLDERS = (BATCH_FOLDER, "kv_disk_folder")
"""Settings that name a folder for what callers wrote."""
OFF = f"files and batches are switched off on this server: the setting {BATCH_FOLDER} names the folder that they need"
"""What the routes say where no folder is set."""


class BatchSettings(BaseModel):
    """What files and batches may take, a part of `Settings`."""

    batch_folder: str = Field(
        "",
        description="folder of files and batches, on a local disk: turns /v1/files and /v1/batches on; it "
        "holds callers' data; empty: off",
    )
    batch_bytes: Bytes = Field(
        10 << 30, description="maximum size of batch_folder in bytes, also as 20GiB; beyond it uploads are refused"
    )
    batch_key_bytes: Bytes = Field(
        2 << 30,
        description="bytes in batch_folder of one API key or tenant; beyond it uploads are refused and batches fail",
    )
    batch_file_bytes: Bytes = Field(200 << 20, description="maximum size of an uploaded file in bytes, also as 100MiB")
    batch_key_files: Count = Field(1000, description="maximum number of files, and of batches, of one API key or tenant")
    batch_lines: Count = Field(50_000, description="maximum number of lines, each a request, in the input file of a batch")
    batch_concurrency: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None,
        description="lines of batches computed at a time, an eighth beside other calls; default: max_batch_requests / 4",
    )
    batch_retention_hours: Annotated[float, Field(gt=0, le=87600)] = Field(
        168.0,
        description="hours after which files and ended batches are deleted; an input file not before its batch ends",
    )
