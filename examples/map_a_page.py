"""Map a page by hand: the four separate steps behind every line of vmkv.

Addresses, memory, the mapping between them and the permission to touch it are four things.
That is why a tensor can stay where it is while its memory comes and goes.
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
print(f"{backend.name} maps pages of {format_bytes(page_bytes)}")


def show(step: str) -> None:
    usage = backend.usage()
    print(
        f"{step:<34} reserved {format_bytes(usage.reserved_bytes):>8}"
        f"   physical {format_bytes(usage.physical_bytes):>8}"
        f"   mapped {format_bytes(usage.mapped_bytes):>8}"
    )


reserved_bytes = 1024 * page_bytes
address = backend.address_reserve(reserved_bytes)
show("1. reserve addresses: no memory yet")

page = backend.mem_create(page_bytes)
show("2. create a page: no address yet")

third_page = address + 2 * page_bytes  # Any page of the range works; those before it stay unmapped.
backend.mem_map(third_page, page_bytes, page)
show("3. map it: touching still faults")

backend.mem_set_access(third_page, page_bytes, Access.READ_WRITE)
show("4. allow reading and writing")

print(f"   a fresh page is zero:            {read_bytes(backend, third_page, 5)!r}")
write_bytes(backend, third_page, b"hello")
print(f"   and then holds what was written: {read_bytes(backend, third_page, 5)!r}")

backend.mem_unmap(third_page, page_bytes)
show("5. unmap: the addresses stay ours")
backend.mem_release(page)
show("6. release: the memory is gone")
backend.address_free(address, reserved_bytes)
show("7. free the addresses")
backend.close()
