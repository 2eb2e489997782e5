"""Packed steps of a model over the rows of a cache.

stepper          runs steps: pieces in, logits out; `warm_up.py` compiles and captures in advance
piece            the work of one row in a step, its packing into one copy to the device, and logits
row_attention    append the new keys and values to their rows, and attend there
graphs           steps as CUDA graphs: decode steps here, steps with prompts in `mixed_graphs.py`
compiled_layers  layers compiled once for all, with `graph_passes.py`, `joined_layers.py`
model_guard      the model's attention implementation, and checks that the model is unchanged

  stepper = Stepper(model, [cache], num_slots=4)
  logits = stepper.run([Piece(slot, row, num_past_tokens, num_new_tokens, token_ids)]).logits
"""

from .model_guard import attending_through as attending_through
from .piece import Piece as Piece
from .stepper import Stepper as Stepper
