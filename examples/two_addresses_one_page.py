"""Two addresses, one page: what is written through one is read through the other.

The second address may only read. This is how a prefix could be shared between sequences
without a copy and without the risk that one of them overwrites it.
"""

import argparse

import torch

from vmkv import open_backend
from vmkv.core.backend import Access
from vmkv.testing import read_bytes, write_bytes
from vmkv.units import format_bytes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "host")
backend = open_backend(parser.parse_args().device)
page_bytes = backend.granularity_bytes

page = backend.mem_create(page_bytes)
writer = backend.address_reserve(page_bytes)
reader = backend.address_reserve(page_bytes)
for address, access in ((writer, Access.READ_WRITE), (reader, Access.READ)):
    backend.mem_map(address, page_bytes, page)
    backend.mem_set_access(address, page_bytes, access)
    print(f"mapped at {address:#x}, allowed: {access.name}")

write_bytes(backend, writer, b"one page")
print(f"written at {writer:#x}, read at {reader:#x}: {read_bytes(backend, reader, 8)!r}")

usage = backend.usage()
print(f"{format_bytes(usage.mapped_bytes)} of addresses are mapped, ", end="")
print(f"{format_bytes(usage.physical_bytes)} of memory are behind them")

print(f"writing at {reader:#x} would be a fault", end="")
if backend.name == "host":  # The kernel's own word for it: r--s may only be read.
    with open("/proc/self/maps") as maps:
        flags = [line.split()[1] for line in maps if line.startswith(f"{reader:x}-")]
    print(f": the kernel lists it as {flags[0]}", end="")
print()

backend.mem_release(page)  # Legal now: the page lives until its last mapping is gone.
backend.mem_unmap(writer, page_bytes)
print(f"one address is gone, the page is not: {read_bytes(backend, reader, 8)!r}")
backend.mem_unmap(reader, page_bytes)
print(f"both are gone: {format_bytes(backend.usage().physical_bytes)} of memory in use")

backend.address_free(writer, page_bytes)
backend.address_free(reader, page_bytes)
backend.close()
