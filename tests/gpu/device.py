"""A GPU for tests on a machine without one: tensors that say that they lie on CUDA, and a device that counts.

Work of a stream runs in order, so nobody sees when a kernel runs but through copies to and from the host. So operations run at
once, and copies late: one to the host is garbage until an event behind it, or the device, was waited for; what is copied from
pinned memory must still be the same by then. The tensors inside lie on the CPU, or on `meta` where sizes are enough.

    device = Device()
    with device:
        ...
    device.launches, device.waits, device.peak
"""

import sys
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from unittest import mock
from weakref import WeakSet, WeakValueDictionary, finalize

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
READS = frozenset({"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})
"""What reads a tensor on the host, and so waits for the device."""
WAITING = frozenset(
    {"nonzero", "_unique2", "unique_dim", "equal", "masked_select", "bincount", "_local_scalar_dense", "is_nonzero"}
)
"""Operations whose result, or its shape, the host must know."""
ROOM = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"})
"""Operations that launch nothing."""
GARBAGE = -(1 << 40)


class Memory:
    """A piece of the device's memory: all views of it hold it, and so does a recording that uses it.

    It holds its storage, whose address would else be given to another one, which would count as this piece.
    """


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, owner: "Device", inner: torch.Tensor, memory: Memory):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        self.owner, self.inner, self.memory = owner, inner, memory
        return self

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        owner = next(each.owner for each in tree_leaves((args, kwargs)) if isinstance(each, OnDevice))
        return owner.compute(function, args, kwargs or {})


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, owner: "Device") -> None:
        self.owner = owner

    def record(self) -> None:
        self.at = self.owner.num_queued

    def synchronize(self) -> None:
        self.owner.drain(self.at)


class Device(TorchFunctionMode):
    """Within it CUDA is this device. `place` is where its tensors really lie."""

    def __init__(self, place: str = "cpu") -> None:
        super().__init__()
        self.place = place
        self.launches: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        """(what, the function of `model` that asked for it): where the host waits for the device."""
        self.moved: int
        """Bytes that kernels and collectives read and write, each of their tensors once; those of torch are not counted."""
        self.faults: list[str] = []
        self.fresh = False
        """True if the last operation has taken memory."""
        self.allocated = self.peak = self.num_queued = self.num_drained = self.moved = 0
        self.recording: WeakSet[Memory] | None = None
        """The memory taken since a recording began, where it was not given back."""
        self.recorded: set[Memory] = set()
        """Memory of others that recordings use."""
        self._queue: deque[Callable[[], None]] = deque()
        self._memory: WeakValueDictionary[int, Memory] = WeakValueDictionary()

    def __enter__(self):
        self._patch = mock.patch("torch.cuda.Event", partial(Event, self))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def reset(self) -> None:
        """Forget what was counted."""
        self.launches.clear()
        self.waits.clear()
        self.peak, self.moved = self.allocated, 0

    def drain(self, until: int | None = None) -> None:
        """Do the copies that were queued before number `until`."""
        while self._queue and (until is None or self.num_drained < until):
            self._queue.popleft()()
            self.num_drained += 1

    def put(self, tensor: torch.Tensor) -> OnDevice:
        """A tensor of the CPU as one of the device, not counted as a copy."""
        return self._wrapped(tensor.detach().to(self.place, copy=True))

    def adopt(self, net: nn.Module) -> None:
        """Move a module to the device, as loading does."""
        for module in net.modules():
            for held in (module._parameters, module._buffers):
                held |= {name: self.put(each) for name, each in held.items() if each is not None}
        if hasattr(net, "rope_tables"):
            net.rope_tables = tree_map(lambda each: self.put(each) if isinstance(each, torch.Tensor) else each, net.rope_tables)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, OnDevice) and name in READS:
            self._wait(name)
            return getattr(self._plain(first), name)(*args[1:], **kwargs)
        if name == "pin_memory":
            pinned = first.clone()
            pinned.pinned = True
            return pinned
        if name in ("to", "cpu", "cuda"):
            return self._moved(function, name, args, kwargs)
        if _is_cuda(kwargs.get("device")) and not isinstance(first, OnDevice):
            if name in ("tensor", "as_tensor", "frombuffer"):
                self._wait(f"{name} on the device")
            made = self._wrapped(function(*args, **kwargs | {"device": self.place}))
            self._made(name, made)
            return made
        if _is_cuda(kwargs.get("device")):
            del kwargs["device"]
        return function(*args, **kwargs)

    def compute(self, function, args, kwargs):
        """An operation on tensors of the device."""
        name = function._schema.name.removeprefix("aten::")
        if name in ("copy_", "_to_copy") and self._crosses(args):
            return self._copied_into(*args[:2], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        self._check(name, args, kwargs)
        kwargs = {key: self.place if key == "device" else value for key, value in kwargs.items()}
        inner = tree_map(lambda each: each.inner if isinstance(each, OnDevice) else each, (args, kwargs))
        with torch._C.DisableTorchFunction():
            given = function(*inner[0], **inner[1])
        if function._schema.is_mutable and name.endswith("_"):
            self._launch(name)
            return args[0]
        self.fresh = False
        same = {id(each.inner): each for each in tree_leaves((args, kwargs)) if isinstance(each, OnDevice)}
        out = tree_map(lambda each: self._known(each, same), given)
        if self.fresh:
            self._made(name, next(each for each in tree_leaves(out) if isinstance(each, OnDevice)))
        return out

    def _check(self, name, args, kwargs):
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        strangers = [each for each in leaves if not isinstance(each, OnDevice) and (each.dim() or name.startswith("index"))]
        if name in WAITING or (name.startswith("index") and any(each.dtype == torch.bool for each in _indices(args))):
            self._wait(name)
        elif strangers and name in ("index", "index_put_", "_index_put_impl_"):
            self._wait(f"{name} by numbers of the host")
        elif strangers:
            self._blame(f"{name} mixes devices")
        if self.recording is not None:
            used = {each.memory for each in leaves if isinstance(each, OnDevice)}
            self.recorded |= used - set(self.recording)

    def _moved(self, function, name, args, kwargs):
        source, *rest = args
        given = [*rest, *kwargs.values()]
        target = next((torch.device(each) for each in given if isinstance(each, str | torch.device)), None)
        target = {"cpu": torch.device("cpu"), "cuda": CUDA}.get(name, target)
        here = isinstance(source, OnDevice)
        if target is None or (target.type == "cuda") == here:
            rest = [each for each in rest if not _is_cuda(each)]
            kwargs = {key: each for key, each in kwargs.items() if not _is_cuda(each)}
            return function(source, *rest, **kwargs) if rest or kwargs or not here else source
        dtype = next((each for each in given if isinstance(each, torch.dtype)), source.dtype)
        if here:
            return self._fetched(source.to(dtype), torch.empty(source.shape, dtype=dtype), kwargs.get("non_blocking", False))
        return self._sent(source.to(dtype) if dtype != source.dtype else source, kwargs.get("non_blocking", False))

    def _crosses(self, args):
        return (
            len(args) > 1
            and isinstance(args[1], torch.Tensor)
            and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice)
        )

    def _copied_into(self, target, source, non_blocking):
        if isinstance(source, OnDevice):
            return self._fetched(source, target, non_blocking)
        target.inner.copy_(self._sent(source, non_blocking).inner)
        return target

    def _sent(self, source, non_blocking):
        """To the device; from pinned memory when its turn comes."""
        if not (non_blocking and getattr(source, "pinned", False)):
            self._wait("blocking copy to the device")
        elif self.recording is not None:
            self._blame("a copy from the host in a recording")
        before = source.clone()

        def unchanged():
            if not torch.equal(torch.nan_to_num(source), torch.nan_to_num(before)):
                self._blame("pinned memory was written before its copy was done")

        self._enqueue(unchanged)
        self.launches["copy to the device"] += 1
        return self._wrapped(source.to(self.place, copy=True))

    def _fetched(self, source, target, non_blocking):
        """To the host, where it arrives when somebody waits."""
        self.launches["copy to the host"] += 1
        if not non_blocking:
            self._wait("blocking copy to the host")
            return target.copy_(self._plain(source))
        if self.recording is not None:
            self._blame("a copy to the host in a recording")
        target.fill_(GARBAGE if target.dtype == torch.int64 else 0 if target.dtype == torch.bool else torch.nan)
        values = self._plain(source).clone()
        self._enqueue(lambda: target.copy_(values))
        return target

    def _enqueue(self, copy):
        self._queue.append(copy)
        self.num_queued += 1

    def _plain(self, tensor):
        """Its values on the CPU; noughts where only sizes are known."""
        inner = tensor.inner
        return torch.zeros(inner.shape, dtype=inner.dtype) if inner.is_meta else inner

    def _wrapped(self, inner):
        place = _place(inner)
        memory = self._memory.get(place)
        if memory is None:
            memory = self._memory[place] = Memory()
            memory.storage = inner.untyped_storage()
            self.fresh = True
            size = inner.untyped_storage().nbytes()
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            finalize(memory, self._release, size)
            if self.recording is not None:
                self.recording.add(memory)
        return OnDevice(self, inner, memory)

    def _known(self, value, same):
        """What an operation gave back: one of its arguments, or a new tensor of the device."""
        if not isinstance(value, torch.Tensor):
            return value
        return same[id(value)] if id(value) in same else self._wrapped(value)

    def _release(self, size):
        self.allocated -= size

    def _made(self, name, made):
        if name not in ROOM:
            self._launch(name)
        elif name.startswith(("empty", "new_empty")) and self.place == "cpu":
            made.inner.fill_(torch.nan if made.inner.is_floating_point() else GARBAGE % 128)

    def _launch(self, name):
        self.launches[name] += 1

    def _wait(self, what):
        if self.recording is not None:
            self._blame(f"{what} in a recording")
        self.waits[what, _asker()] += 1
        self.drain()

    def _blame(self, what):
        self.faults.append(f"{what}: {_asker()}")


class Kernel:
    """Stands in a Triton kernel's place: its launches are counted, and it computes nothing."""

    def __init__(self, owner: Device, name: str) -> None:
        self.owner, self.name = owner, name

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **constants):
        tensors = [each for each in (*args, *constants.values()) if isinstance(each, torch.Tensor)]
        if not all(isinstance(each, OnDevice) for each in tensors):
            self.owner._blame(f"{self.name} got a tensor of the host")
        if self.owner.recording is not None:
            self.owner.recorded |= {each.memory for each in tensors} - set(self.owner.recording)
        self.owner.moved += sum(each.nbytes for each in tensors)
        self.owner._launch(self.name)


def _indices(args):
    return [each for each in tree_leaves(args[1:2]) if isinstance(each, torch.Tensor)]


def _place(inner):
    return inner.untyped_storage()._cdata


def _is_cuda(device):
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _asker() -> str:
    """The innermost function of `model` that runs."""
    frame = sys._getframe()
    while frame is not None and "/model/" not in frame.f_code.co_filename.replace("/tests/model/", "/"):
        frame = frame.f_back
    return "a test" if frame is None else frame.f_code.co_qualname
