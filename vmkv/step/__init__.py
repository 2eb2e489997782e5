"""One packed step of a model over the rows of a cache, and nothing of who wants it.

piece           what one row does in a step
packing         pieces to one array of integers, sent in one copy
row_attention   append the new keys and values to their rows, and attend there
graphs          steps as CUDA graphs: `decode_graphs.py`, `mixed_graphs.py`
compiled_layers layers compiled once for all (`joined_layers.py`, `warm_up.py`, `operator.py`)
interface       how a transformers model is made to attend here
stepper         all of it: pieces in, logits out; `warm_up.py` what is done ahead

  stepper = Stepper(model, [cache], num_slots=4)
  logits = stepper.run([Piece(slot, row, num_past_tokens, num_new_tokens, token_ids)]).logits
"""

from .model_guard import attending_through as attending_through
from .piece import Piece as Piece
from .stepper import Stepper as Stepper
