"""DLPack capsules without the compiled module.

Reading and consuming goes through ctypes. Making a capsule goes through NumPy's own ``__dlpack__``
over the same memory: its deleter is compiled code, so a consumer may call it from a thread without
the GIL or while the interpreter shuts down, which a ctypes callback does not survive. (NumPy before
1.24 forgot that; there a callback has to do.) NumPy is given unsigned integers of the right width
and the capsule's dtype is corrected afterwards, because older releases refuse bool, and all refuse
bfloat16 and read-only memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpubridge.tensor.native import Capsule, CapsuleEngine

_SOMEWHERE = 64
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_USED = {_PLAIN: b"used_dltensor", _VERSIONED: b"used_dltensor_versioned"}


class _Producer:
    """Producer's tensor of a consumed capsule, whose deletion calls the deleter."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, deleter: Any, address: int) -> None:
        self._deleter = deleter
        self._address = address

    def __del__(self) -> None:
        self._deleter(self._address)


class ArrayInterface:
    """Exposes memory to NumPy as unsigned integers; NumPy keeps this object, and so the owner."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(
        self, owner: object, address: int, shape: tuple[int, ...], width: int, read_only: bool
    ) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(f"u{width}").str,
            "shape": shape,
            "data": (address, read_only),
        }


@functools.cache
def engine() -> CapsuleEngine:
    """Return the engine; the first call imports ctypes, which some interpreters lack."""
    return _CtypesEngine()


class _CtypesEngine:
    def __init__(self) -> None:
        # An interpreter may come without ctypes.
        import ctypes  # noqa: PLC0415

        from gpubridge.tensor import dlpack_abi  # noqa: PLC0415

        api = ctypes.pythonapi
        self._is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_IsValid", api)
        )
        self._pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", api)
        )
        self._rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_SetName", api)
        )
        # Called with the GIL, on which deleters of NumPy before 1.24 rely.
        self._deleter_type = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
        self._abi = dlpack_abi
        self._numpy_deleter: Any = None
        # Such a deleter is guarded, for consumers that call it without the GIL: a CFUNCTYPE
        # callback takes it.
        self._guard = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete_with_gil)
        self._guard_address = ctypes.cast(self._guard, ctypes.c_void_p).value
        self._numpy_needs_gil = tuple(map(int, np.__version__.split(".")[:2])) < (1, 24)

    def _delete_with_gil(self, address: int) -> None:
        self._numpy_deleter(address)

    def _managed(self, capsule: Capsule) -> tuple[bytes, int, Any]:
        for name, layout in (
            (_PLAIN, self._abi.DLManagedTensor),
            (_VERSIONED, self._abi.DLManagedTensorVersioned),
        ):
            if self._is_valid(capsule, name):
                address = self._pointer(capsule, name)
                return name, address, layout.from_address(address)
        raise ValueError(
            "expected a DLPack capsule that has not been consumed, got another capsule or one "
            "that was consumed before"
        )

    def capsule_read(self, capsule: Capsule, /) -> tuple[Any, ...]:
        name, _, managed = self._managed(capsule)
        flags = 0
        if name == _VERSIONED:
            if managed.version.major != 1:
                # Beyond this field a foreign major version may look different.
                raise ValueError(
                    f"expected a DLPack capsule of version 1, got version {managed.version.major}"
                )
            flags = managed.flags
        tensor = managed.dl_tensor
        ndim = tensor.ndim
        if ndim < 0 or (ndim > 0 and not tensor.shape):
            raise ValueError(f"expected a DLPack tensor with a shape, got {ndim} dimensions")
        return (
            tensor.data or 0,
            tensor.device.device_type,
            tensor.device.device_id,
            tensor.dtype.code,
            tensor.dtype.bits,
            tensor.dtype.lanes,
            tuple(tensor.shape[:ndim]) if ndim else (),
            tuple(tensor.strides[:ndim]) if ndim and tensor.strides else None,
            tensor.byte_offset,
            flags,
        )

    def capsule_take(self, capsule: Capsule, /) -> object:
        name, address, managed = self._managed(capsule)
        deleter = managed.deleter
        # CPython keeps the pointer to the name, so the name must never die.
        self._rename(capsule, _USED[name])
        return _Producer(self._deleter_type(deleter), address) if deleter else None

    def capsule_make(  # noqa: PLR0913  (the fields of DLPack's struct)
        self,
        owner: object,
        address: int,
        shape: Sequence[int],
        dtype: tuple[int, int],
        device: tuple[int, int],
        flags: int,
        versioned: bool,
        /,
    ) -> Capsule:
        code, bits = dtype
        # Some releases of NumPy take no array at address 0, which one of no elements may have.
        lent = ArrayInterface(owner, address or _SOMEWHERE, tuple(shape), bits // 8, False)
        array = np.asarray(lent)
        capsule = self._numpy_capsule(array, versioned)
        name, _, managed = self._managed(capsule)
        managed.dl_tensor.dtype.code = code
        # Also where NumPy has given an array of no elements another address.
        managed.dl_tensor.data = address or None
        managed.dl_tensor.device.device_type, managed.dl_tensor.device.device_id = device
        if name == _VERSIONED:
            managed.flags = flags
        if self._numpy_needs_gil:
            self._numpy_deleter = self._deleter_type(managed.deleter)
            managed.deleter = self._guard_address
        return capsule

    def _numpy_capsule(self, array: Any, versioned: bool) -> Capsule:
        if versioned:
            try:
                return array.__dlpack__(max_version=(1, 0))
            except TypeError:
                # NumPy before 2.1 makes unversioned capsules only, which consumers must accept.
                pass
        return array.__dlpack__()
