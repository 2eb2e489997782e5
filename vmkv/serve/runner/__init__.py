"""How a step is executed: `base.py` is the contract, `eager.py` any device, the rest CUDA."""

from .base import Chunk as Chunk
from .base import PendingStep as PendingStep
from .base import Runner as Runner
from .base import SlotError as SlotError
from .base import StepResult as StepResult
