"""The public test kit, for authors of backends.

    from vmkv.testing import check_backend
    check_backend(MyBackend)             # raises AssertionError, naming the broken rule

Free of torch; nothing in vmkv imports it.
"""

from .backend_checks import BACKEND_CHECKS as BACKEND_CHECKS
from .backend_checks import BackendCheck as BackendCheck
from .backend_checks import check_backend as check_backend
from .faults import FaultInjectingBackend as FaultInjectingBackend
from .faults import Scenario as Scenario
from .faults import check_every_call_can_fail as check_every_call_can_fail
from .pages import read_bytes as read_bytes
from .pages import write_bytes as write_bytes
