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
from importlib.metadata import version
from pathlib import Path

import torch

from attend.model import devices, machine
from attend.model.backends.native import Native
from attend.model.backends.triton import Triton
from attend.model.config import ModelConfig
from attend.model.engine.build import choose_way, use_threads
from attend.model.engine.fallback import kept_kind
from attend.model.engine.options import EngineOptions
from attend.model.engine.speed_estimate import Speeds, count_parameters, measure_speed
from attend.model.errors import AttendError, SettingError
from attend.model.net.checkpoint import inspect, quantised_decoder, read_config
from attend.model.net.native.build import absence
from attend.model.net.native.library import variant
from attend.model.net.quantised import count_bytes
from attend.model.shapes import known_shape, write_config
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


@dataclass
class Check:
    """A thing that was looked at."""

    name: str
    outcome: str
    """`ok`, `failed` or `skipped`."""
    detail: str
    seconds: float = 0.0


class Doctor:
    """Looks at one thing after the other, and shows each as it is known."""

    def __init__(self, settings: Settings, shape: str | None, show: Print) -> None:
        self.settings, self.shape, self._show = settings, shape, show
        self.current = "start"
        self.checks: list[Check] = []
        self.advice: list[str] = []
        self._served = ""

    def note(self, name: str, detail: str, seconds: float = 0.0, *, outcome: str = "ok") -> None:
        """Keep a check for the result, and print it."""
        self.checks.append(Check(name, outcome, detail, seconds))
        self._show(outcome, f"{seconds:.1f} s", name, detail)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is under way. An error of ours fails the check of this name with its sentence, and what goes on in it."""
        self.current, began = name, time.perf_counter()
        try:
            yield
        except (AttendError, MemoryError) as error:
            self.note(name, str(error), time.perf_counter() - began, outcome="failed")

    def run(self) -> None:
        """All of it. Whatever fails leaves the rest."""
        lacking = "; ".join(untested_packages())
        python = f"Python {platform.python_version()}, torch {version('torch')}, ray {version('ray')}"
        self.note("packages", lacking or python, outcome="failed" if lacking else "ok")
        device = self._look_at_device()
        options = replace(engine_options(self.settings), device=device, kernel_check="replace")  # whatever a server does
        use_threads(options)
        with tempfile.TemporaryDirectory(prefix="attend-doctor-") as place, self.part("model"):
            folder = self._folder(Path(place))
            options = replace(options, load_format="dummy" if self.shape else "auto")
            config = self._look_at_model(folder, device)
            self.current = "kernels"
            self._compute(folder, config, options, device)

    def _look_at_device(self) -> str:
        """The device that would serve; what is wrong with it is a failed check."""
        wanted, device = self.settings.device, "cpu"
        unused = "" if wanted == "cpu" else devices.unused_gpu()
        if unused:
            self.note("GPU", unused, outcome="failed")
        with self.part("GPU"):
            device = devices.choose_device(wanted)
        if device == "cuda":
            self._look_at_gpu()
        else:
            self._look_at_processor()
        return device

    def _look_at_gpu(self) -> None:
        found, (free, total) = devices.gpu(), torch.cuda.mem_get_info()
        about = f"{found['device']}, compute capability {found['capability']}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        driver = machine.ask_driver(("driver_version",))
        self.note("GPU", f"{about}, driver {driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}")
        if devices.capability() < devices.BFLOAT16:
            self.advice.append("the GPU is older than Ampere: it serves float16 by the torch backend, without Triton")
        if Triton.absence() is not None:
            self.note("Triton", "it is not installed: pip install triton, as it comes with torch for CUDA", outcome="failed")

    def _look_at_processor(self) -> None:
        cores, sets = machine.usable_cores(), ", ".join(machine.instruction_sets()) or "no wide vectors"
        threads, free = self.settings.num_threads or cores, machine.available_memory()
        about = f"{machine.processor_name()} with {sets}; {threads} threads on {cores} cores"
        self.note("processor", f"{about}; {free / 1e9:.1f} GB free")
        if threads < cores:
            self.advice.append(f"num_threads is {threads}, and there are {cores} cores")
        if machine.large_pages() == "never":
            self.advice.append("large pages are off: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
        if Native.absence() is not None:
            self.note("native library", absence()[1], outcome="failed")
        else:
            self.note("native library", f"built, its best variant here: {variant()}")

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

    def _look_at_model(self, folder: Path, device: str) -> ModelConfig:
        config = read_config(folder) if self.shape else inspect(folder)
        net = None if self.shape else quantised_decoder(folder)
        parameters = count_parameters(config) if net is None else net.num_parameters
        dtype = torch.float32 if self.settings.dtype == "float32" else torch.bfloat16
        size: float = parameters * dtype.itemsize if net is None else count_bytes(net, dtype)
        size *= {"int8": 0.53, "int4": 0.28}.get(self.settings.quantize, 1.0)
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else machine.available_memory()
        self._served = f"shape {self.shape}" if self.shape else self.settings.name
        about = f"{self._served}: {config.family}, {parameters / 1e6:.1f}M parameters, about {size / 1e9:.2f} GB of weights"
        more = "" if size < free else f"; {free / 1e9:.1f} GB are free: quantize = int8 or int4 takes less"
        self.note("model", about + more, outcome="failed" if more else "ok")
        return config

    def _compute(self, folder: Path, config: ModelConfig, options: EngineOptions, device: str) -> None:
        """Choose the backend as a server does, whose law looks at its kernels, and time it."""
        backend, dtype, held, fallback = choose_way(folder, config, options, device, 1)
        kind = backend.quantized_kind(options.quantize, device)
        if kind is None and not self.shape:
            kind = kept_kind(backend, folder)
        shown, slower = str(dtype).removeprefix("torch."), fallback.path()
        is_bad = slower is not None and slower.reason.startswith("kernel_")
        about = f"{shown} by the {backend.attention.name} backend"
        self.note("backend", f"{about}; {slower.cause}" if slower else about, outcome="failed" if is_bad else "ok")
        self._served += f" on {device} ({devices.name_of_device(device)}) in {about}"
        if device == "cpu" and variant() not in ("", "portable") and dtype != torch.bfloat16:
            self.advice.append(f"dtype is {shown}: bfloat16 halves what a step reads, and the native decoder serves it")
        if kind is None and backend.name.partition("-")[0] in ("native", "triton") and not config.num_experts:
            self.advice.append("quantize = int8 halves what a step reads, int4 quarters it (attend quality measures the cost)")
        with self.part("device speed"):
            rates = devices.rates(device, SIZES[device], dtype)
            if device == "cpu":
                rates["bytes"] = max(rates["bytes"], devices.read_rate())
            self.note("device speed", f"{rates['bytes'] / 1e9:.1f} GB/s of memory, {rates['flops'] / 1e12:.2f} TFLOP/s")
        with self.part("model speed"):
            self._show_speeds(measure_speed(config, backend, dtype, held, device, kind, fallback, rates), config)
        for finding in fallback.findings:
            told = finding.cause or "computes what torch computes on this device"
            self.note(finding.part, told, finding.seconds, outcome="ok" if finding.ok else "failed")

    def _show_speeds(self, found: Speeds | None, config: ModelConfig) -> None:
        if found is None:
            self.note("model speed", "one layer of it is too large to be initialised in time", outcome="skipped")
            return
        if any(found.graphs):
            self.note("recorded steps", f"CUDA graphs {found.graphs[0]}, piecewise {found.graphs[1]}")
        part = "" if found.num_layers == config.num_layers else f", from {found.num_layers} of {config.num_layers} layers"
        for speed in found.speeds:  # weights that stay in the caches, and products that are not torch's, may pass the limit
            share = f", {speed.share:.0%} of what the device allows" if speed.share <= 1 else ""
            self.note(speed.work, f"{speed.tokens_per_second:,.3g} tokens/s{share}{part}")

    def verdict(self) -> str:
        """What all checks have shown, in one line."""
        bad = [check for check in self.checks if check.outcome == "failed"]
        return f"Not fine: {bad[0].name}: {bad[0].detail}" if bad else f"Fine: {self._served}"


def show(settings: Settings, shape: str | None, *, as_json: bool) -> int:
    """Look, and print a line for each thing, what would make it faster, and a verdict; or one JSON object. Returns the exit
    status: 1 where something would not serve as it should.
    """
    if shape is not None:
        known_shape(shape)
    doctor = Doctor(settings, shape, printer(silent=as_json))
    timer = threading.Timer(LIMIT, _give_up, (doctor, as_json))
    timer.daemon = True
    timer.start()
    doctor.run()
    timer.cancel()
    return _end(doctor, as_json=as_json)


def _end(doctor: Doctor, *, as_json: bool) -> int:
    verdict, is_well = doctor.verdict(), all(check.outcome != "failed" for check in doctor.checks)
    if as_json:
        document = {"ok": is_well, "verdict": verdict, "checks": list(map(asdict, doctor.checks)), "advice": doctor.advice}
        print(json.dumps(document), flush=True)
    else:
        print("\n".join([*(f"faster: {tip}" for tip in doctor.advice), verdict]), flush=True)
    return int(not is_well)


def _give_up(doctor: Doctor, as_json: bool) -> None:
    """End the process: what hangs in a driver, or in a compiler, cannot be ended."""
    doctor.note(doctor.current, f"it did not end within {LIMIT:.0f} s", outcome="failed")
    sys.stdout.flush()
    os._exit(_end(doctor, as_json=as_json))
