"""How a step of the engine is executed: `base.py` is the contract, `model_runner.py` does it."""

from .base import PendingStep as PendingStep
from .base import Runner as Runner
from .base import SlotError as SlotError
from .base import StepResult as StepResult
from .model_runner import ModelRunner as ModelRunner
from .model_runner import RunnerOptions as RunnerOptions
