"""A played NVML: a library of the driver's name and layout, with cards that a test chooses."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 2**20
SOURCE = r"""
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { const char *uuid, *name; int major, minor;
                 unsigned long long total, reserved, free; int slice_of; } card;
static card cards[] = { CARDS {0} };
static const int count = COUNT;
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
static card *whole(unsigned index) {
  for (int i = 0; i < count; i++)
    if (cards[i].slice_of < 0 && index-- == 0) return cards + i;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned *n) { for (*n = 0; whole(*n); ++*n); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = whole(i); return *h ? 0 : 2; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **slice) {
  for (int i = 0; i < count; i++)
    if (cards[i].slice_of == (card *)h - cards && index-- == 0) { *slice = cards + i; return 0; }
  return 6;
}
int nvmlDeviceGetUUID(void *h, char *t, unsigned n) { strncpy(t, ((card *)h)->uuid, n); return 0; }
int nvmlDeviceGetName(void *h, char *t, unsigned n) { strncpy(t, ((card *)h)->name, n); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  *major = ((card *)h)->major; *minor = ((card *)h)->minor; return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2 *m) {
  card *c = h;
  if (m->version != (sizeof(memory_v2) | 2 << 24)) return 25;
  if (!c->total) return 3;
  m->total = c->total; m->reserved = c->reserved; m->free = c->free;
  m->used = c->total - c->reserved - c->free;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { return 3; }
"""


@dataclass(frozen=True)
class PlayedCard:
    """A card of a played driver; sizes in MiB, `slice_of` the number of the card it is cut from."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    reserved: int = 0
    slice_of: int = -1
    uuid: str = ""


T4 = PlayedCard("Tesla T4", (7, 5), 15360, 14900, 400, uuid="GPU-t4")
RTX_4090 = PlayedCard("NVIDIA GeForce RTX 4090", (8, 9), 24564, 23000, 456, uuid="GPU-4090")
GB10 = PlayedCard("NVIDIA GB10", (12, 1), 0, 0, uuid="GPU-spark")


def play_driver(folder: Path, *cards: PlayedCard, init: int = 0) -> dict[str, str]:
    """Build the library, and make the environment of a process that finds it, and a CUDA plugin."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    rows = "".join(
        f'{{"{card.uuid or f"GPU-{number}"}", "{card.name}", {card.capability[0]}, '
        f"{card.capability[1]}, {card.total * MIB}ull, {card.reserved * MIB}ull, "
        f"{card.free * MIB}ull, {card.slice_of}}}, "
        for number, card in enumerate(cards)
    )
    source = SOURCE.replace("CARDS", rows).replace("COUNT", str(len(cards)))
    path = folder / "played" / "nvml.c"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source.replace("INIT", str(init)))
    library = path.parent / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, path], check=True)
    (path.parent / "jax_cuda13_plugin").mkdir(exist_ok=True)
    left_out = ("JAX_", "CUDA_", "XLA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment["LD_LIBRARY_PATH"] = str(path.parent)
    environment["PYTHONPATH"] = f"{os.getcwd()}{os.pathsep}{path.parent}"
    return environment
