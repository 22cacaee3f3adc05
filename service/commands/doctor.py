"""`attend doctor`: what is here, whether a model would be served right, how fast, and what is missing. Ends within a minute.

It downloads nothing and reads no weights: what computes is compared with torch on this device, and timed, with random ones.
On a GPU not yet run.
"""

import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attend.model import devices, machine
from attend.model.backends.backend import Backend
from attend.model.backends.native import Native
from attend.model.backends.triton import Triton
from attend.model.config import ModelConfig
from attend.model.engine.build import choose_way, use_threads
from attend.model.engine.fallback import Fallback, kept_kind
from attend.model.engine.options import EngineOptions
from attend.model.engine.speed import Speeds, measure_speed
from attend.model.errors import AttendError, SettingError
from attend.model.net.checkpoint import inspect, quantised_decoder, read_config
from attend.model.net.formats.codes import Kind
from attend.model.net.native.build import absence
from attend.model.net.native.library import variant
from attend.model.net.quantised import count_bytes
from attend.model.shapes import SHAPES, write_config
from attend.service.commands.report import Print, printer
from attend.service.runtime import hub
from attend.service.runtime.sizes import engine_options
from attend.service.settings import Settings
from attend.service.tested_versions import untested_packages
from attend.service.values import HUB

LIMIT = 55.0
"""Seconds after which it ends with what it knows."""
SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices that a device multiplies, by device."""
KEYS = {
    "ok": "whether nothing failed",
    "verdict": "the last line",
    "seconds": "how long it took",
    "facts": "packages, device, driver, memory in bytes, model, backend and dtype, by name",
    "checks": "name, outcome (ok, failed, skipped), detail, seconds and advice of each thing that was looked at",
    "speed": "bytes_per_second and flops of the device; layers_measured, recorded (graphs, pieces), and steps: each with work, "
    "tokens_per_second, limit (what the measured memory or product allows; null where it bounds nothing) and share of it",
    "advice": "what would make it faster",
}
"""The fields of the object that `--json` prints."""


@dataclass
class Check:
    """A thing that was looked at."""

    name: str
    outcome: str
    """`ok`, `failed` or `skipped`."""
    detail: str
    seconds: float = 0.0
    advice: str = ""
    """What to do about it; empty: nothing."""


class Way(NamedTuple):
    """How the model would be computed."""

    config: ModelConfig
    backend: Backend
    dtype: torch.dtype
    weight_dtype: torch.dtype
    kind: Kind | None
    fallback: Fallback


class Doctor:
    """Looks at one thing after the other, and shows each as it is known."""

    def __init__(self, settings: Settings, shape: str | None, show: Print) -> None:
        self.settings, self.shape, self._show = settings, shape, show
        self.began, self.at = time.perf_counter(), "start"
        self.checks: list[Check] = []
        self.facts: dict[str, Any] = {}
        self.speed: dict[str, Any] = {}
        self.tips: list[str] = []

    def note(self, check: Check) -> None:
        """Keep a check for the result, and print it."""
        self.checks.append(check)
        advice = f"; {check.advice}" if check.advice else ""
        self._show(check.outcome, f"{check.seconds:.1f} s", check.name, check.detail + advice)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is under way. An error of ours fails the check of this name with its sentence, and what goes on in it."""
        self.at, began = name, time.perf_counter()
        try:
            yield
        except (AttendError, MemoryError) as error:
            self.note(Check(name, "failed", str(error), time.perf_counter() - began))

    def run(self) -> None:
        """All of it. Whatever fails leaves the rest."""
        self._look_at_packages()
        device = self._look_at_device()
        options = replace(engine_options(self.settings), device=device, kernel_check="replace")  # whatever a server does
        use_threads(options)
        with tempfile.TemporaryDirectory(prefix="attend-doctor-") as place:
            way = None
            with self.part("model"):
                folder = self._folder(Path(place))
                options = replace(options, load_format="dummy" if self.shape else "auto")
                config = self._look_at_model(folder)
                way = self._choose(folder, config, options, device)
            rates = self._weigh(device, torch.float32 if way is None else way.dtype)
            if way is not None:
                self._time(way, device, rates)

    def _look_at_packages(self) -> None:
        self.at = "packages"
        names = ("attend-server", "torch", "triton", "ray")
        self.facts |= {"python": platform.python_version()} | {name: _version(name) for name in names}
        shown = ", ".join(f"{name} {self.facts[name] or 'not installed'}" for name in names)
        lacking = list(untested_packages())
        self.note(
            Check("packages", "failed" if lacking else "ok", f"Python {self.facts['python']}, {shown}", 0, "; ".join(lacking))
        )

    def _look_at_device(self) -> str:
        """The device that would serve; what is wrong with it is a failed check."""
        self.at, wanted = "device", self.settings.device
        driver = machine.ask_driver(("driver_version", "name", "memory.total", "compute_cap"))
        self.facts |= {"driver": driver[0] if driver else None, "cuda": torch.version.cuda}
        unused = "" if wanted == "cpu" else devices.unused_gpu()
        if unused:
            self.note(Check("GPU", "failed", unused))
        device = "cpu"
        with self.part("GPU"):
            device = devices.choose_device(wanted)
        if device == "cuda":
            self._look_at_gpu()
        else:
            self._look_at_processor()
        self.facts["device"], self.facts["name"] = device, devices.name_of_device(device)
        return device

    def _look_at_gpu(self) -> None:
        found = devices.gpu()
        self.facts |= {name: found.get(name) for name in ("capability", "memory", "processors", "shared_memory", "devices")}
        free, total = torch.cuda.mem_get_info()
        self.facts["free_memory"] = free
        about = f"{found['device']}, compute capability {found['capability']}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        old = devices.capability() < devices.BFLOAT16
        advice = "older than Ampere: float16 and the torch backend, without Triton" if old else ""
        self.note(Check("GPU", "ok", f"{about}, driver {self.facts['driver']}, CUDA {self.facts['cuda']}", 0, advice))
        if Triton.absence() is not None:
            self.note(
                Check("Triton", "failed", "it is not installed", 0, "pip install triton, as it comes with torch for CUDA")
            )

    def _look_at_processor(self) -> None:
        cores, threads = machine.usable_cores(), self.settings.num_threads or machine.usable_cores()
        found: dict[str, Any] = {
            "instruction_sets": machine.instruction_sets(),
            "cores": cores,
            "threads": threads,
            "native": variant(),
        }
        found |= {"free_memory": machine.available_memory(), "large_pages": machine.large_pages()}
        self.facts |= found
        sets = ", ".join(found["instruction_sets"]) or "no wide vectors"
        about = f"{machine.processor_name()} with {sets}; {_cores(cores)}, {threads} threads"
        self.note(Check("processor", "ok", f"{about}; {found['free_memory'] / 1e9:.1f} GB free"))
        if threads < cores:
            self.tips.append(f"num_threads is {threads}, and {_cores(cores)} are free for it")
        if found["large_pages"] == "never":
            self.tips.append("large pages are off: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
        if Native.absence() is not None:
            self.note(Check("native library", "failed", absence()[1]))
        else:
            self.note(Check("native library", "ok", f"built, its best variant here: {variant()}"))

    def _folder(self, place: Path) -> Path:
        """Where config.json is. SettingError for a checkpoint of the hub that is not in the cache."""
        if self.shape is not None:
            return write_config(self.shape, place)
        if not self.settings.model.startswith(HUB):
            return self.settings.folder
        found = hub.cached_folder(self.settings.model)
        if found is None:
            raise SettingError(f"{self.settings.model} is not in the cache of the hub: download it with attend pull first")
        return found

    def _look_at_model(self, folder: Path) -> ModelConfig:
        began = time.perf_counter()
        config = read_config(folder) if self.shape else inspect(folder)
        net = quantised_decoder(folder) if not self.shape else None
        parameters = net.num_parameters if net is not None else _parameters(config)
        dtype = torch.float32 if self.settings.dtype == "float32" else torch.bfloat16
        size: float = count_bytes(net, dtype) if net is not None else parameters * dtype.itemsize
        size = size * {"int8": 0.53, "int4": 0.28}.get(self.settings.quantize, 1.0)
        name = f"shape {self.shape}" if self.shape else self.settings.name
        self.facts |= {"model": name, "family": config.family, "parameters": parameters, "weights_bytes": round(size)}
        about = f"{name}: {config.family}, {parameters / 1e6:.1f}M parameters, about {size / 1e9:.2f} GB of weights"
        fits = size < self.facts["free_memory"]
        advice = "" if fits else f"{self.facts['free_memory'] / 1e9:.1f} GB are free: quantize = int8 or int4 takes less"
        self.note(Check("model", "ok" if fits else "failed", about, time.perf_counter() - began, advice))
        return config

    def _choose(self, folder: Path, config: ModelConfig, options: EngineOptions, device: str) -> Way:
        """Choose the backend as a server does, whose law looks at its kernels."""
        self.at = "kernels"
        backend, dtype, held, fallback = choose_way(folder, config, options, device, 1)
        kind = backend.quantized_kind(options.quantize, device)
        if kind is None and not self.shape:
            kind = kept_kind(backend, folder)
        self.facts |= {"backend": backend.attention.name, "dtype": str(dtype).removeprefix("torch.")}
        for finding in fallback.findings:
            self._note_finding(finding)
        slower = fallback.path()
        about = f"{self.facts['dtype']} by the {backend.attention.name} backend"
        bad = slower is not None and slower.reason.startswith("kernel_")
        self.note(Check("backend", "failed" if bad else "ok", about, 0, slower.cause if slower else ""))
        return Way(config, backend, dtype, held, kind, fallback)

    def _note_finding(self, finding: Any) -> None:
        detail = finding.cause or "computes what torch computes on this device"
        self.note(Check(finding.part, "ok" if finding.ok else "failed", detail, finding.seconds))

    def _weigh(self, device: str, dtype: torch.dtype) -> dict[str, float]:
        self.at, began = "device speed", time.perf_counter()
        found = devices.rates(device, SIZES[device], dtype)
        if device == "cpu":
            found["bytes"] = max(found["bytes"], devices.read_rate())
        self.speed |= {"bytes_per_second": found["bytes"], "flops": found["flops"]}
        shown = f"{found['bytes'] / 1e9:.1f} GB/s of memory, {found['flops'] / 1e12:.2f} TFLOP/s in {str(dtype)[6:]}"
        self.note(Check("device speed", "ok", shown, time.perf_counter() - began))
        return found

    def _time(self, way: Way, device: str, rates: dict[str, float]) -> None:
        before = len(way.fallback.findings)
        speeds: Speeds | None = None
        with self.part("model speed"):
            speeds = measure_speed(way.config, way.backend, way.dtype, way.weight_dtype, device, way.kind, way.fallback, rates)
        for finding in way.fallback.findings[before:]:
            self._note_finding(finding)
        if speeds is None:
            if self.checks[-1].outcome != "failed":
                self.note(Check("model speed", "skipped", "one layer of it is too large to be initialised in time"))
            return
        part = (
            ""
            if speeds.num_layers == way.config.num_layers
            else f", from {speeds.num_layers} of {way.config.num_layers} layers"
        )
        self.speed |= {"layers_measured": speeds.num_layers, "recorded": list(speeds.graphs), "steps": []}
        if any(speeds.graphs):
            self.note(Check("recorded steps", "ok", f"CUDA graphs {speeds.graphs[0]}, piecewise {speeds.graphs[1]}"))
        for speed in speeds.speeds:
            what = "memory" if "stream" in speed.work else "matrix product"
            # torch's product bounds only what multiplies by it, and memory no weights that stay in the caches
            is_bound = speed.share <= 1 and (what == "memory" or not way.backend.name.startswith("native"))
            known = {"limit": speed.limit, "share": speed.share} if is_bound else {"limit": None, "share": None}
            self.speed["steps"].append({"work": speed.work, "tokens_per_second": speed.tokens_per_second} | known)
            share = f", {speed.share:.0%} of what the measured {what} allows" if is_bound else ""
            shown = f"{_number(speed.tokens_per_second)} tokens/s{share}{part}"
            self.note(Check(speed.work, "ok", shown))
        self._advise(way, device)

    def _advise(self, way: Way, device: str) -> None:
        """Add what would make the model faster here to the advice."""
        if device == "cpu" and variant() not in ("", "portable") and way.dtype != torch.bfloat16:
            self.tips.append(
                f"dtype is {self.facts['dtype']}: bfloat16 halves what a step reads, and the native decoder serves it"
            )
        if way.kind is None and way.backend.name.partition("-")[0] in ("native", "triton") and not way.config.num_experts:
            self.tips.append(
                "quantize = int8 halves what a step reads, int4 quarters it (attend quality measures what that costs)"
            )

    def verdict(self) -> str:
        """What all checks have shown, in one line."""
        bad = [check for check in self.checks if check.outcome == "failed"]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            return f"Not fine: {bad[0].name}: {bad[0].detail}{more}"
        steps = {step["work"]: step for step in self.speed.get("steps", ())}
        fast = ", ".join(f"{work} {_number(step['tokens_per_second'])}" for work, step in steps.items())
        facts = self.facts
        where = f"{facts['model']} on {facts['device']} ({facts['name']}) in {facts['dtype']} by {facts['backend']}"
        return f"Fine: {where}" + (f"; tokens/s: {fast}" if fast else "")

    def document(self) -> dict[str, Any]:
        """All that is known, for --json."""
        well = all(check.outcome != "failed" for check in self.checks)
        found = {"ok": well, "verdict": self.verdict(), "seconds": round(time.perf_counter() - self.began, 1)}
        return found | {
            "facts": self.facts,
            "checks": [asdict(check) for check in self.checks],
            "speed": self.speed,
            "advice": self.tips,
        }


def show(settings: Settings, shape: str | None, *, as_json: bool) -> int:
    """Look, and print a line for each thing, what would make it faster, and a verdict; or one JSON object. Returns the exit
    status: 1 where something would not serve as it should.
    """
    if shape is not None and shape not in SHAPES:
        raise SettingError(f"there is no shape {shape!r}: known are {', '.join(SHAPES)}")
    doctor = Doctor(settings, shape, printer(silent=as_json))
    timer = threading.Timer(LIMIT, _give_up, (doctor, as_json))
    timer.daemon = True
    timer.start()
    doctor.run()
    timer.cancel()
    return _end(doctor, as_json=as_json)


def _end(doctor: Doctor, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(doctor.document()), flush=True)
    else:
        print("\n".join([*(f"faster: {tip}" for tip in doctor.tips), doctor.verdict()]), flush=True)
    return int(any(check.outcome == "failed" for check in doctor.checks))


def _give_up(doctor: Doctor, as_json: bool) -> None:
    """End the process: what hangs in a driver, or in a compiler, cannot be ended."""
    doctor.note(Check(doctor.at, "failed", f"it did not end within {LIMIT:.0f} s"))
    sys.stdout.flush()
    os._exit(_end(doctor, as_json=as_json))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parameters(config: ModelConfig) -> int:
    from attend.model.engine.speed import count_parameters

    return count_parameters(config)


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cores(number: int) -> str:
    return f"{number} core" if number == 1 else f"{number} cores"
