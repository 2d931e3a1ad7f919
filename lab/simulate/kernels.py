"""Kernels of a simulated GPU: for every operator that has one for CUDA, the CPU's kernel on the
same memory.

They are registered in PyTorch's dispatcher, below autograd, so that everything above them is what
runs on a GPU: autograd and its threads, DTensor, FSDP, torch.compile's traces. Memory, views,
streams and copies stay PyTorch's own.

What a GPU refuses is refused here: a CPU tensor among CUDA tensors. Host-device syncs are recorded,
with the line of the program (`HostRecord`).
"""

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.simulate.attention import WRITTEN_OUT

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parent.parent.parent
HERE = str(Path(__file__).resolve().parent)
TORCH = str(Path(torch.__file__).parent)  # as frames have it: .venv may be a link
CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# keys whose kernels take tensors of a CPU
ON_A_CPU = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)

# These touch no element: PyTorch's own code for CUDA runs.
NATIVE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::record_stream",
    "aten::is_set_to",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::_fused_sdp_choice",
    "aten::_pin_memory",
    "aten::is_pinned",
    "aten::_reshape_alias",
    "aten::_local_scalar_dense",
}
# These may be given CPU tensors together with CUDA tensors.
MIXED = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}
# The size of their output depends on values, so they need a host-device sync.
WAITING = {
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
}
BY_MASK = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"}


class HostRecord:
    """Host-device syncs: (inside a training step, why, file:line) ->
    times."""

    def __init__(self) -> None:
        self.in_step = False
        self.waits: Counter[tuple[bool, str, str]] = Counter()
        # copies from pageable memory, in the same way
        self.late: Counter[tuple[bool, str, str]] = Counter()
        self.operators: Counter[str] = Counter()

    def wait(self, why: str) -> None:
        self.waits[self.in_step, why, where()] += 1


RECORD = HostRecord()


def where() -> str:
    """Return file:line of the innermost line of this project's, or, where there is none on the
    stack, of the innermost one outside PyTorch."""
    frame = sys._getframe(1)
    outside = ""
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)) and not file.startswith((HERE, TORCH)):
            return f"{os.path.relpath(file, ROOT)}:{frame.f_lineno}"
        if not outside and not file.startswith((HERE, TORCH, "<")):
            outside = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return outside or "PyTorch's backward"


class SimulatedDevice:
    """Simulated device: the library that replaces CUDA (lab/simulate/device), with which this
    process was started."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        try:
            self.settle_stream = self.library.simulated_settle
        except AttributeError:
            raise RuntimeError(
                "this process was not started on a simulated GPU (lab/simulate/ranks.py)"
            ) from None
        self.settle_stream.argtypes = (ctypes.c_int, ctypes.c_void_p)
        self.library.simulated_is_pinned.argtypes = (ctypes.c_void_p,)
        self.library.simulated_where.argtypes = (ctypes.c_char_p,)
        self.library.simulated_collectives.restype = ctypes.c_char_p
        self.library.cudaStreamSynchronize.argtypes = (ctypes.c_void_p,)

    def settle(self, index: int) -> None:
        """Wait for what the current stream of this device waits for."""
        self.settle_stream(index, torch._C._cuda_getCurrentRawStream(index))

    def is_pinned(self, x: Tensor) -> bool:
        return bool(self.library.simulated_is_pinned(x.untyped_storage().data_ptr()))


# ------------------------------------------------------------------------ between the two memories


def alias(x: Tensor) -> Tensor:
    """Return a CPU tensor on the memory of a CUDA tensor."""
    storage = x.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    same = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), size
    )
    return torch.empty(0, dtype=x.dtype).set_(same, x.storage_offset(), x.size(), x.stride())


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a CUDA tensor with the values, and the strides, of a CPU tensor."""
    made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    if x.numel():
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.size(), x.stride()))
        ctypes.memmove(made.data_ptr(), x.data_ptr(), span * x.element_size())
    return made


def generator_for(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return a CPU generator that continues from the state of the CUDA one: its seed and how much
    it has drawn. The numbers are not those of a GPU."""
    if given is None or given.device.type == "cpu":
        given = torch.cuda.default_generators[device.index or 0]
    seed = given.initial_seed()
    offset = given.get_offset()
    given.set_offset(offset + 4)
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % 2**63)


# ----------------------------------------------------------------------------------------- kernels


class Kernel:
    """Kernel of one operator on CUDA tensors."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device = device
        self.name = name
        packet, _, overload = name.removeprefix("aten::").partition(".")
        self.op = getattr(getattr(aten, packet), overload or "default")
        self.compute: Callable = WRITTEN_OUT.get(name, self.op)
        schema = self.op._schema
        self.arguments = [argument.name for argument in schema.arguments]
        # of each result: the argument that it is
        self.written = [self._argument_of(returned) for returned in schema.returns]
        self.draws = self.arguments.index("generator") if "generator" in self.arguments else None
        self.outs = [argument.name for argument in schema.arguments if argument.is_out]
        self.tensors = [
            n for n, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"
        ]

    def _argument_of(self, returned: Any) -> int | None:
        info = returned.alias_info
        if info is None or not info.is_write:
            return None
        for number, argument in enumerate(self.op._schema.arguments):
            same = (
                argument.alias_info is not None
                and argument.alias_info.before_set == info.before_set
            )
            if same:
                return number
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self, kwargs.get("device"))
        cpu_args = [call.down(x) for x in args]
        cpu_kwargs = {key: call.down(x) for key, x in kwargs.items()}
        self._check(call, args, kwargs)
        self._random(call, cpu_args, cpu_kwargs)
        fresh = self._fresh_outs(kwargs, cpu_kwargs)
        if "device" in cpu_kwargs:
            cpu_kwargs["device"] = torch.device("cpu")
        if cpu_kwargs.get("pin_memory"):
            cpu_kwargs["pin_memory"] = False
        self.device.settle(call.target.index)
        RECORD.operators[self.name] += 1
        compute = self.op.overloadpacket if self._has_number(cpu_args) else self.compute
        result = compute(*cpu_args, **cpu_kwargs)
        for name in fresh:
            out = kwargs[name].resize_(cpu_kwargs[name].shape)
            alias(out).copy_(cpu_kwargs[name])
        return self._lifted(call, result, args, kwargs)

    def _has_number(self, args: list) -> bool:
        """Return True if a Python number is given where a tensor is declared, as in `x + 1`, which
        has its own overload."""
        return any(
            n < len(args) and isinstance(args[n], (bool, int, float, complex)) for n in self.tensors
        )

    def _check(self, call: "_Call", args: tuple, kwargs: dict) -> None:
        if call.host and call.found and self.name not in MIXED:
            raise RuntimeError(
                f"{self.name}: Expected all tensors to be on the same device, but found at least "
                "two devices, cuda and cpu "
                f"(a tensor of shape {list(call.host[0].shape)}), at {where()}"
            )
        is_told = kwargs.get("output_size") is not None
        if (self.name in WAITING and not is_told) or self._counts_a_mask(args):
            RECORD.wait(f"{self.op.overloadpacket.__name__} asks for a size")

    def _counts_a_mask(self, args: tuple) -> bool:
        """Return True if it turns a mask into indices, whose number the host must know. A mask to
        which a scalar of the host is written is a masked_fill, which need not know."""
        if self.name not in BY_MASK:
            return False
        has_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        value = args[2] if len(args) > 2 else None
        is_fill = isinstance(value, (bool, int, float)) or (
            isinstance(value, Tensor) and value.dim() == 0 and not value.is_cuda
        )
        return has_mask and not is_fill

    def _random(self, call: "_Call", args: list, kwargs: dict) -> None:
        if self.draws is None:
            return
        if "generator" in kwargs or self.draws >= len(args):
            kwargs["generator"] = generator_for(kwargs.get("generator"), call.target)
        else:
            args[self.draws] = generator_for(args[self.draws], call.target)

    def _fresh_outs(self, kwargs: dict, cpu_kwargs: dict) -> list[str]:
        """Return the outputs that are given empty, to be made as large as needed: an alias cannot
        grow."""
        names = [
            name
            for name in self.outs
            if isinstance(kwargs.get(name), Tensor) and kwargs[name].numel() == 0
        ]
        for name in names:
            cpu_kwargs[name] = torch.empty(0, dtype=kwargs[name].dtype)
        return names

    def _lifted(self, call: "_Call", result: Any, args: tuple, kwargs: dict) -> Any:
        if len(self.written) == 0:
            return None
        results = (result,) if len(self.written) == 1 else result
        lifted = []
        for number, x in zip(self.written, results, strict=True):
            if number is None:
                lifted.append(call.up(x))
                continue
            name = self.arguments[number]
            lifted.append(args[number] if number < len(args) else kwargs[name])
        return lifted[0] if len(lifted) == 1 else tuple(lifted)


class _Call:
    """Call on its way to the CPU: its arguments, and its results on their way back."""

    def __init__(self, kernel: Kernel, device: torch.device | str | None) -> None:
        self.target = None
        if device is not None and torch.device(device).type == "cuda":
            self._aim(torch.device(device))
        self.found = False  # a tensor of the device
        self.host: list[Tensor] = []  # those of the host that are no scalars

    def _aim(self, device: torch.device) -> None:
        self.target = (
            device
            if device.index is not None
            else torch.device("cuda", torch.cuda.current_device())
        )

    def down(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.is_cuda:
                self.found = True
                if self.target is None:
                    self._aim(x.device)
                return alias(x)
            if x.dim():
                self.host.append(x)
            return x
        if isinstance(x, (list, tuple)):
            return [self.down(item) for item in x]
        return x

    def up(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return on_device(x, self.target)
        if isinstance(x, (list, tuple)):
            return [self.up(item) for item in x]
        return x


def copy(device: SimulatedDevice, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Compute `copy_`, from and to the device."""
    if to.is_cuda and source.is_cuda:
        device.settle(to.device.index)
        alias(to).copy_(alias(source))
        return to
    if to.numel() == 0:
        return to
    pinned = device.is_pinned(source if to.is_cuda else to)
    direction = "to the GPU" if to.is_cuda else "to the host"
    if not non_blocking:
        RECORD.wait(f"a copy {direction}, not non_blocking")
    elif not pinned and to.is_cuda:
        RECORD.late[RECORD.in_step, "a copy from pageable memory", where()] += 1
    elif not pinned:
        RECORD.wait("a copy to pageable memory")
    if pinned and non_blocking:
        device.library.simulated_where(where().encode())
    return aten.copy_.default.redispatch(CPU_KEY, to, source, non_blocking)


def foreach_copy(to: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """Compute `_foreach_copy_`, whose tensors may be on both sides."""
    for one, source in zip(to, sources, strict=True):
        one.copy_(source, non_blocking=non_blocking)


def item(device: SimulatedDevice, x: Tensor) -> Any:
    """Compute `x.item()`, `float(x)`, `bool(x)`: a host-device sync."""
    RECORD.wait("item")
    with torch.cuda.device(x.device):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        device.library.cudaStreamSynchronize(stream)
    return alias(x).item()


def _is_view(op: torch._ops.OpOverload) -> bool:
    infos = [returned.alias_info for returned in op._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _names() -> list[str]:
    """Return the operators with a kernel for CUDA that are computed here."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not has_kernel(name, "CUDA") or name in NATIVE:
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        on_cpu = any(has_kernel(name, key) for key in ON_A_CPU)
        if not _is_view(op) and (on_cpu or name in WRITTEN_OUT):
            names.append(name)
    return names


def _record_explicit_waits() -> None:
    """Write down where the program itself waits for an event, a stream or the device."""

    def noting(real: Callable, why: str) -> Callable:
        def wait(*args: Any, **kwargs: Any) -> Any:
            RECORD.wait(why)
            return real(*args, **kwargs)

        return wait

    torch.cuda.Event.synchronize = noting(torch.cuda.Event.synchronize, "an event")
    torch.cuda.Stream.synchronize = noting(torch.cuda.Stream.synchronize, "a stream")
    torch.cuda.synchronize = noting(torch.cuda.synchronize, "the device")


_LIBRARIES = []  # a registration lives as long as its library


def install() -> SimulatedDevice:
    """Register all kernels in this process, which must not have used CUDA yet."""
    device = SimulatedDevice()
    library = torch.library.Library("aten", "IMPL", "CUDA")
    _LIBRARIES.append(library)
    for name in _names():
        if name != "aten::_foreach_copy_":
            library.impl(name.removeprefix("aten::"), Kernel(device, name), allow_override=True)
    library.impl("_foreach_copy_", foreach_copy, allow_override=True)
    library.impl("copy_", partial(copy, device), allow_override=True)
    library.impl("_local_scalar_dense", partial(item, device), allow_override=True)
    _record_explicit_waits()
    return device
