"""Run code as the user nobody, which root may do unless a sandbox forbids it."""

from __future__ import annotations

import functools
import os
import subprocess

NOBODY = 65534

#: Code for a child after its imports: the user nobody may have no access to the interpreter.
BECOME_NOBODY = f"""
import os
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""


@functools.cache
def can_become_nobody() -> bool:
    """Whether child processes may run `BECOME_NOBODY`."""
    if os.geteuid() != 0:
        return False
    try:
        subprocess.run(["true"], user=NOBODY, group=NOBODY, check=True)
    except OSError:
        return False
    return True
