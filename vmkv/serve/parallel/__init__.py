"""Tensor parallelism: one process per device, all running the same steps at the same time.

`group.py` connects the ranks; `collectives.py` has the layers' collectives as operators, and
`one_shot.py` adds small parts in one kernel; `sharding.py` divides a model's parameters;
`localise.py` loads a part and computes with it; `lockstep.py` and `engine.py` run an engine on
every rank; `processes.py` starts ranks.
"""

from .group import TensorParallel as TensorParallel
from .localise import localise as localise
from .processes import Ranks as Ranks
