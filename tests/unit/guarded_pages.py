"""Memory before and behind which nothing may be read."""

import ctypes
import mmap

__all__ = ["guarded_pages"]


class guarded_pages:  # noqa: N801  (used as a function)
    """Memory of one page between two that may not be touched."""

    def __enter__(self):
        self.memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for page in (0, 2):
            at = ctypes.c_void_p(address + page * mmap.PAGESIZE)
            assert libc.mprotect(at, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        return self.memory, mmap.PAGESIZE

    def __exit__(self, *error):
        self.memory.close()
