"""What was compiled and tuned, kept in a folder between processes and machines.

torch keeps its own in a temporary folder, which containers lose. This is one file per model's
configuration, kind of device and release of torch, next to nothing to load.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch

from ..cache.whole_file import whole_file

_LOG = logging.getLogger(__name__)


class CompileCache:
    """One file of compiled code.

    It holds code that torch will run: use a folder that only you can write.

    Args:
        folder: Where it lies; None keeps nothing.
        config: The model's configuration.
    """

    def __init__(self, folder: Path | None, config: Any):
        self._path: Path | None = None
        if folder is not None:
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            text = "\n".join([config.to_json_string(), device, str(torch.__version__)])
            self._path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.compiled"
        self._loaded_bytes = 0

    def load(self) -> bool:
        """Hand what the file holds to torch; whether there was any. A bad file is ignored."""
        if self._path is None or not self._path.exists():
            return False
        content = self._path.read_bytes()
        try:
            found = torch.compiler.load_cache_artifacts(content)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with it, compiling helps
            _LOG.warning("%s cannot be read and will be replaced: %s", self._path, error)
            return False
        self._loaded_bytes = len(content)
        return found is not None

    def save(self) -> bool:
        """Write what was compiled since the process began, if it is more; whether it did."""
        if self._path is None:
            return False
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None or len(artifacts[0]) <= self._loaded_bytes:
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A reader sees the old file or the new one, whichever rank writes at the same time.
        with whole_file(self._path) as file:
            file.write(artifacts[0])
        return True
