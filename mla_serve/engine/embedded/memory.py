"""Memory of the latent cache: how many pages there is room for, and zeros that cost nothing until they are written."""

from __future__ import annotations

import math
import mmap

import psutil
import torch
from torch import Tensor

from mla_serve.errors import UserError

__all__ = ["pages_in_memory", "zeros"]


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU they are the system's untouched pages, so that a large pool costs memory and time only where it is used.

    torch.zeros would write to all of it.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def pages_in_memory(device: torch.device, page_bytes: int, *, least: int, most: int) -> int:
    """Pages for the latent cache: what `most` asks for, or nine tenths of free GPU memory, or half of free host memory.

    Call it once the weights are in place. Raises UserError where not even `least` pages (one request of full length) fit.
    """
    cuda = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[0] * 9 // 10 if cuda else psutil.virtual_memory().available // 2
    fit = int(room // page_bytes)
    if fit < least:
        raise UserError(
            f"one request of full length needs {least * page_bytes / 2**20:.0f} MiB of latent cache and {room / 2**20:.0f} MiB "
            "are free; lower the maximum length or free memory"
        )
    return min(fit, most)
