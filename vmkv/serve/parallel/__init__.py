"""Tensor parallelism: one process for each device, all of which do the same at the same time.

`group.py` is the ranks of a model, and how they agree; `collectives.py` what their layers exchange,
and `one_shot.py` how small parts are added; `sharding.py` which part of a model is whose, and
`localise.py` layers that compute with a part, and `divided_head.py` what they find without the
whole; `agreed_backend.py` drivers that answer all ranks the
same; `processes.py` ranks as processes.
"""

from .group import TensorParallel as TensorParallel
from .localise import localise as localise
from .processes import Ranks as Ranks
