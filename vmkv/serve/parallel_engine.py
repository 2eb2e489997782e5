"""Public path of the tensor-parallel engine."""

from .parallel.engine import ParallelEngine as ParallelEngine
from .parallel.engine import open_parallel_engine as open_parallel_engine
