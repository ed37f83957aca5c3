"""The few calls of the CUDA driver that a copier makes, through ctypes.

Python lets one thread run at a time, and a busy engine gives its turn away every 5 ms only. So calls that return
at once keep the turn: a copier that gave it away with each would take 5 ms for every step of a copy. Calls that
take long give it away."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

import numpy as np

from forebay.copier.streams import Addresses
from forebay.errors import ForebayError

_OUT_OF_MEMORY, _NOT_READY = 2, 600
_RELAXED = 2
_NOT_BEHIND_THE_DEFAULT = 1  # streams do not wait for the default stream, nor it for them
_WITHOUT_TIMING = 2
_MANY = 256  # copies in a batch, at about a microsecond each: as in a chunk of blocks of 512 KiB
_FEW = 16  # copies one by one; more might fill the driver's queue, which would then wait
_IN_STREAM_ORDER = 1  # sources are read when their turn in the stream comes, not before
_PORTABLE = 1  # registered memory is pinned for all contexts


class CudaError(ForebayError):
    """The driver refused."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_uint), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", c_uint),
    )


class Driver:
    """Made in a thread that has a CUDA context; `enter` gives another thread the same."""

    def __init__(self) -> None:
        try:
            self._slow = ctypes.CDLL("libcuda.so.1")  # other threads run meanwhile
            self._library = ctypes.PyDLL("libcuda.so.1")  # they do not
        except OSError as error:
            raise CudaError(f"forebay: expected a CUDA driver, libcuda.so.1, got {error}") from error
        self._context = c_void_p()
        self._call("cuCtxGetCurrent", byref(self._context))
        if not self._context:
            raise CudaError("forebay: expected a CUDA context in this thread, got none")
        self._batch_copy = self._find_batch_copy(self._library)
        self._large_batch_copy = self._find_batch_copy(self._slow)
        self._stream = self.new_stream(urgent=False)
        self._attributes = _CopyAttributes(source_access_order=_IN_STREAM_ORDER)
        self._attributes_from = c_size_t(0)

    @property
    def has_batch_copy(self) -> bool:
        return self._batch_copy is not None

    def enter(self) -> None:
        """For a thread of our own. While an engine captures a graph, the driver refuses calls such as pinning
        memory from all threads, and spoils the graph, unless a thread says that it has nothing to do with it."""
        self._call("cuCtxSetCurrent", self._context)
        self._exchange_capture_mode(_RELAXED)

    def _exchange_capture_mode(self, mode: int) -> int:
        before = c_int(mode)
        self._call("cuThreadExchangeStreamCaptureMode", byref(before))
        return before.value

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """The same for one call, in a thread that may be the engine's."""
        before = self._exchange_capture_mode(_RELAXED)
        try:
            yield
        finally:
            self._exchange_capture_mode(before)

    def pci_bus_id(self) -> str:
        device, name = c_int(), ctypes.create_string_buffer(32)
        self._call("cuCtxGetDevice", byref(device))
        self._call("cuDeviceGetPCIBusId", name, c_int(len(name)), device)
        return name.value.decode()

    def register(self, address: int, num_bytes: int) -> None:
        """Pin memory. From any thread."""
        self._call("cuCtxSetCurrent", self._context)
        with self._beside_captures():
            result = self._slow.cuMemHostRegister_v2(c_void_p(address), c_size_t(num_bytes), c_uint(_PORTABLE))
        self._check("cuMemHostRegister_v2", result)

    def unregister(self, address: int) -> None:
        self._call("cuCtxSetCurrent", self._context)
        with self._beside_captures():
            result = self._slow.cuMemHostUnregister(c_void_p(address))
        self._check("cuMemHostUnregister", result)

    def allocate(self, num_bytes: int) -> int:
        """Memory of the device, zeroed. Not PyTorch's: that gives out what an engine has freed on the same stream
        and still uses, and an engine that sleeps takes its memory away. Raises MemoryError."""
        address = c_uint64()
        with self._beside_captures():
            result = self._slow.cuMemAlloc_v2(byref(address), c_size_t(num_bytes))
            if result == _OUT_OF_MEMORY:
                raise MemoryError(f"{num_bytes} bytes of device memory")
            self._check("cuMemAlloc_v2", result)
        # On a stream of its own: the default one, and waiting for the whole device, would meddle with captures.
        self.fill(self._stream, address.value, 0, num_bytes)
        self.synchronize(self._stream)
        return address.value

    def free(self, address: int) -> None:
        with self._beside_captures():
            self._check("cuMemFree_v2", self._slow.cuMemFree_v2(c_uint64(address)))

    def new_stream(self, *, urgent: bool) -> int:
        """Of its own: PyTorch's are a few that take turns, and the engine may have the same one."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        priority = greatest if urgent else least
        self._call("cuStreamCreateWithPriority", byref(stream), c_uint(_NOT_BEHIND_THE_DEFAULT), priority)
        assert stream.value is not None
        return stream.value

    def synchronize(self, stream: int) -> None:
        self._check("cuStreamSynchronize", self._slow.cuStreamSynchronize(c_void_p(stream)))

    def new_event(self) -> int:
        event = c_void_p()
        self._call("cuEventCreate", byref(event), c_uint(_WITHOUT_TIMING))
        assert event.value is not None
        return event.value

    def drop_event(self, event: int) -> None:
        """It may still be waited for: the driver sees to that."""
        self._library.cuEventDestroy_v2(c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))

    def has_passed(self, event: int) -> bool:
        result = self._library.cuEventQuery(c_void_p(event))
        if result != _NOT_READY:
            self._check("cuEventQuery", result)
        return bool(result != _NOT_READY)

    def wait_here(self, event: int) -> None:
        self._check("cuEventSynchronize", self._slow.cuEventSynchronize(c_void_p(event)))

    def load(self, binary: bytes, name: str) -> int:
        """A kernel of a compiled module, which stays for as long as the context does."""
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), c_char_p(binary))
        self._call("cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        assert function.value is not None
        return function.value

    def launch(
        self,
        function: int,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        addresses: ctypes.Array[c_void_p],
    ) -> None:
        size = (*grid, 1, threads, 1, 1, shared_bytes)
        self._call("cuLaunchKernel", c_void_p(function), *map(c_uint, size), c_void_p(stream), addresses, None)

    def upload(self, stream: int, destination: int, source: int, num_bytes: int) -> None:
        """A few bytes of pinned memory to the device."""
        self._call(
            "cuMemcpyHtoDAsync_v2", c_uint64(destination), c_void_p(source), c_size_t(num_bytes), c_void_p(stream)
        )

    def fill(self, stream: int, address: int, byte: int, num_bytes: int) -> None:
        self._call("cuMemsetD8Async", c_uint64(address), c_ubyte(byte), c_size_t(num_bytes), c_void_p(stream))

    def copy(
        self, stream: int, destinations: Addresses, sources: Addresses, sizes: Addresses, *, pinned: bool = True
    ) -> None:
        """Runs of bytes, in any order, behind what the stream was given before."""
        if self._batch_copy is None or len(sizes) == 1 or not pinned:
            # From memory that is not pinned the call returns when the bytes are there.
            library = self._library if pinned and len(sizes) <= _FEW else self._slow
            self._copy_one_by_one(library, stream, destinations, sources, sizes)
            return
        batch_copy = self._batch_copy if len(sizes) <= _MANY else self._large_batch_copy
        assert batch_copy is not None
        columns = [np.ascontiguousarray(each, dtype=np.uint64) for each in (destinations, sources, sizes)]
        batch_copy(
            *(c_void_p(column.ctypes.data) for column in columns),
            c_size_t(len(sizes)),
            byref(self._attributes),
            byref(self._attributes_from),
            c_size_t(1),
            c_void_p(stream),
        )

    def _copy_one_by_one(
        self, library: ctypes.CDLL, stream: int, destinations: Addresses, sources: Addresses, sizes: Addresses
    ) -> None:
        copy = library.cuMemcpyAsync
        for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._check(
                "cuMemcpyAsync", copy(c_void_p(destination), c_void_p(source), c_size_t(size), c_void_p(stream))
            )

    def _find_batch_copy(self, library: ctypes.CDLL) -> Callable[..., None] | None:
        """From driver 570 on. Version 2 of the call does not say which of the copies was refused."""
        if (second := getattr(library, "cuMemcpyBatchAsync_v2", None)) is not None:
            return lambda *values: self._check("cuMemcpyBatchAsync_v2", second(*values))
        if (first := getattr(library, "cuMemcpyBatchAsync", None)) is None:
            return None
        refused = c_size_t()
        return lambda *values: self._check("cuMemcpyBatchAsync", first(*values[:-1], byref(refused), values[-1]))

    def _call(self, name: str, *values: object) -> None:
        self._check(name, getattr(self._library, name)(*values))

    def _check(self, name: str, result: int) -> None:
        if result:
            text = c_char_p()
            self._library.cuGetErrorName(c_uint(result), byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")
