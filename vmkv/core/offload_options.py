"""Options of the tiers below the device: host memory, and files in a folder. Free of torch."""

from __future__ import annotations

import os

from ..errors import ConfigError, shown


def check_offload_options(
    host_budget_bytes: object, disk_folder: object, disk_budget_bytes: object
) -> None:
    """Raise `ConfigError` unless sizes and folder have their types, and go together."""
    sizes = {"host_budget_bytes": host_budget_bytes, "disk_budget_bytes": disk_budget_bytes}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ConfigError(f"{name}={shown(size)} must be a number of bytes: an integer from 0")
    if disk_folder is not None:
        path = os.fspath(disk_folder) if isinstance(disk_folder, (str, os.PathLike)) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError(
                f"disk_folder={shown(disk_folder)} must be the path of a folder: a str or a Path"
            )
    if (disk_folder is not None) != bool(disk_budget_bytes):
        raise ConfigError("disk_folder and disk_budget_bytes go together: give both or neither")
