"""The C library's memory allocator on the CPU: keep what training frees, it is wanted again at
once.

Every step allocates and frees the same activations. glibc gives large freed blocks back to the
kernel and gets
them again as fresh pages, each zeroed at first touch: here 14 ms for the 33 MB of one step's
    logits, as long as
the matrix product that fills them. Kept, they cost nothing.
"""

from __future__ import annotations

import ctypes
import sys

# Names and numbers from glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_GROW_BYTES = 64 << 20
"""How much more than asked for the heap grows by."""


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory in this process from now on; call before the first large
    tensor.

    Returns:
        Whether the C library took it. False, without any effect, where it is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl and others have none
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _GROW_BYTES))
    return all([mallopt(option, value) == 1 for option, value in wanted])
