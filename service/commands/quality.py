"""`attend quality`: what quantisation costs a model, measured on a text."""

import codecs
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from attend.model.engine.options import EngineOptions
from attend.model.engine.scorer import ServingScorer
from attend.model.errors import CheckpointError, SettingError
from attend.model.net.checkpoint import has_codes, makes_text, read_config
from attend.model.net.outliers import write_with_outliers
from attend.model.quality import Quality, Scorer, compare
from attend.model.text.tokenizer import Tokenizer
from attend.model.train import corpus
from attend.service.runtime import hub
from attend.service.runtime.checkpoint import read_tokenizer
from attend.service.settings import Settings

FORMS: dict[str, dict[str, Any]] = {"int8": {"quantize": "int8"}, "int4": {"quantize": "int4"}, "kv-int8": {"kv_dtype": "int8"}}
"""Forms beside the model as it is, of its weights or of its KV cache, and what sets them."""
CONTEXT = 1024
"""Tokens of a window, where the model knows as many positions."""
WORK = 3 << 40
"""Bytes of text times parameters that take two slow cores about a minute a form: most tokens are read twice."""
LEAST_BYTES = 8192
"""Enough for a thousand tokens."""
MAX_BYTES = 1 << 24


class Text(NamedTuple):
    """The text whose bits per byte are measured."""

    name: str
    parts: Sequence[str]

    def truncate(self, num_bytes: int) -> "Text":
        """The first so many bytes, whole characters."""
        parts, left = [], num_bytes
        for part in self.parts:
            parts.append(part.encode()[:left].decode(errors="ignore"))
            left -= len(part.encode())
            if left <= 0:
                break
        return Text(self.name, parts)

    @property
    def num_bytes(self) -> int:
        """Size of the text in bytes of UTF-8."""
        return sum(len(part.encode()) for part in self.parts)

    def tokens(self, tokenizer: Tokenizer, start: int | None) -> list[int]:
        """Those of all parts in a row, each after the token that starts a text, where the model has one."""
        found: list[int] = []
        for part in self.parts:
            tokens = tokenizer.encode(part)
            found += tokens if start is None or tokens[:1] == [start] else [start, *tokens]
        return found


def read_text(path: Path | None) -> Text:
    """A file, or the standard library's Python files that the default model has not seen. Raises SettingError."""
    if path is None:
        root = corpus.standard_library()
        return Text(f"held-out files of {root}", corpus.read_texts(root, held_out=True))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)
        decoder = codecs.getincrementaldecoder("utf-8")()
        return Text(str(path), [decoder.decode(content, final=len(content) < MAX_BYTES)])
    except OSError as error:
        raise SettingError(f"text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"text {path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from error


def names_of(text: str) -> list[str]:
    """Forms as they are given, int8,int4. Raises SettingError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in FORMS:
            raise SettingError(f"quantize has {name!r}; it takes {', '.join(FORMS)}, with commas between them")
    return list(dict.fromkeys(names))


def open_forms(settings: Settings, folder: Path, names: Sequence[str], context: int) -> dict[str, ServingScorer]:
    """The model as it is, under the name of its dtype, and then the named forms: all of them in memory side by side."""
    plain = EngineOptions(device=settings.device, dtype=settings.dtype, backend=settings.backend)
    options = [plain, *(replace(plain, **FORMS[name]) for name in names)]
    forms = [ServingScorer(folder, each, context) for each in options]
    return dict(zip([forms[0].info.weights, *names], forms, strict=True))


@contextmanager
def with_outliers(folder: Path, factor: float | None) -> Iterator[Path]:
    """A folder with the same model, with outliers where a factor is given. Raises SettingError."""
    if factor is None:
        yield folder
        return
    if not 1 <= factor <= 65536:
        raise SettingError(f"outliers must be a factor from 1 to 65536; got {factor:g}")
    with tempfile.TemporaryDirectory(prefix="attend-outliers-") as target:
        write_with_outliers(folder, Path(target), factor)
        yield Path(target)


def measure_quality(
    forms: Mapping[str, Scorer], text: Text, tokenizer: Tokenizer, start: int | None, context: int
) -> dict[str, Any]:
    """The quality of each form on a text; the others are compared with the first. Raises SettingError."""
    tokens = text.tokens(tokenizer, start)
    if len(tokens) <= context:
        raise SettingError(
            f"{text.name} has {len(tokens)} tokens in the {text.num_bytes} bytes that are read: "
            f"more than one window of {context} are needed"
        )
    columns = (TextColumn("Reading"), BarColumn(), TextColumn("{task.completed} of {task.total} tokens"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=len(tokens))
        found = compare(list(forms.values()), tokens, context, lambda count: bar.update(task, completed=count))
    rows = [_row(name, quality, found[0], text.num_bytes) for name, quality in zip(forms, found, strict=True)]
    return {"text": text.name, "bytes": text.num_bytes, "positions": len(tokens) - 1, "forms": rows}


def _row(name: str, quality: Quality, first: Quality, num_bytes: int) -> dict[str, Any]:
    return {
        "form": name,
        "bits_per_byte": quality.bits_per_byte(num_bytes),
        "ratio": quality.nats / first.nats,
        "ratio_error": quality.uncertainty(first) / first.nats,
        "kl_divergence": quality.divergence / quality.positions,
        "agreement": quality.agreed / quality.positions,
    }


def table(report: Mapping[str, Any]) -> str:
    """The rows for a person: a Markdown table."""
    first = report["forms"][0]["form"]
    lines = [f"| weights | bits per byte | over {first} | KL divergence, nats a token | same most likely token |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in report["forms"]:
        ratio = f"{row['ratio']:.4f} ± {row['ratio_error']:.4f}" if row["ratio_error"] else "1"
        numbers = (f"{row['bits_per_byte']:.4f}", ratio, f"{row['kl_divergence']:.3g}", f"{row['agreement']:.2%}")
        lines.append("| " + " | ".join((row["form"], *numbers)) + " |")
    return "\n".join(lines)


def show(
    settings: Settings, *, quantize: str | None, text: Path | None, num_bytes: int | None, outliers: float | None, as_json: bool
) -> None:
    """Measure, and print a table or one JSON object. Raises CheckpointError or SettingError."""
    names, read = None if quantize is None else names_of(quantize), read_text(text)
    if num_bytes is not None and num_bytes < 1:
        raise SettingError(f"bytes must be at least 1; got {num_bytes}")
    settings = hub.with_folder(settings)
    config = read_config(settings.folder)
    if not makes_text(settings.folder):
        raise CheckpointError(f"{settings.folder} has no head: there are no probabilities to measure")
    if names is None:
        names = [] if has_codes(settings.folder) else ["int8", "int4"]
    tokenizer = read_tokenizer(settings.folder, config.vocab_size)
    start = config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    context = min(CONTEXT, config.max_positions)
    with with_outliers(settings.folder, outliers) as folder:
        forms = open_forms(settings, folder, names, context)
    info = next(iter(forms.values())).info
    cut = read.truncate(num_bytes or max(LEAST_BYTES, WORK // info.num_parameters))
    found = measure_quality(forms, cut, tokenizer, start, context)
    found = {"model": settings.name, "outliers": outliers, "backend": info.backend, "window": context} | found
    if as_json:
        print(json.dumps(found))
        return
    like = f", with outliers of factor {outliers:g}" if outliers else ""
    print(
        f"{found['model']}{like}, {info.backend}: {found['bytes']:,} bytes of {found['text']}, {found['positions']:,} positions"
    )
    print(f"in windows of {context} tokens that overlap by half\n\n{table(found)}")
