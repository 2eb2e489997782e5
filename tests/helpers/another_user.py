"""Being another user, which root may, if nothing around it forbids that."""

from __future__ import annotations

import functools
import os
import subprocess

NOBODY = 65534

#: Lines for a child that has imported all it needs: its interpreter may be out of nobody's reach.
BECOME_NOBODY = f"""
import os
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""


@functools.cache
def can_become_nobody() -> bool:
    """Whether children of this process may run those lines."""
    if os.geteuid() != 0:
        return False
    try:
        subprocess.run(["true"], user=NOBODY, group=NOBODY, check=True)
    except OSError:
        return False
    return True
