"""Attention over rows: one protocol, several stock kernels, no block table.

base        a kernel's protocol, the call that it gets, the batch of a step, a layer's description
registry    selection of the backend that serves a layer
append      write a step's keys and values into their rows
flash2, flash3, sdpa    the backends, imported when first used

  backend = select(AttentionSpec("cuda", torch.bfloat16, 32, 8, 128, 128))
  batch = AttentionBatch.build(rows, lengths, queries, row_tokens=..., device="cuda")
  call = Call(query, keys, values, batch, scale=128**-0.5)
  append(call, (key, value))
  out = backend.attend(call)
"""

from .append import append as append
from .base import AttentionBackend as AttentionBackend
from .base import AttentionBatch as AttentionBatch
from .base import AttentionSpec as AttentionSpec
from .base import Call as Call
from .base import Span as Span
from .registry import backend_names as backend_names
from .registry import get as get
from .registry import register as register
from .registry import select as select
from .registry import why_not as why_not
