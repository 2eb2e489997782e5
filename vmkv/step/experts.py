from typing import NamedTuple
class Form(NamedTuple):
    is_transposed: bool
    is_interleaved: bool
    is_gelu: bool
    alpha: float
    limit: float
    offset: float
