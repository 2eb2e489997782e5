"""Training and serving take turns with one model, whose weights change in between.

After a turn the model is compared with the one that was served: other values make cached prefixes
stale, and other addresses or modules a new runner necessary.

See DESIGN.md, Note [Training has the model in turns].
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError, shown
from ..hf import compat
from ..hf.proof import Proof, prove
from ..step.model_guard import checksums_of, eval_mode, unmerge_disabled
from .options import EngineOptions
from .runner import ModelRunner, make_runner
from .served_rows import ServedRows
from .weights import Weights, check_awake


class Vocabulary(NamedTuple):
    """Columns of a model's logits, rows of its embedding, and its end-of-sequence tokens."""

    num_logits: int
    num_embeddings: int
    ends: frozenset[int]

    @classmethod
    def of(cls, model: Any) -> Vocabulary:
        """Read a model's vocabulary; `ConfigError` in training mode, or without an output head."""
        if model.training:
            raise ConfigError("the model is in training mode; call model.eval() first")
        if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
            what = f"{type(model).__name__} has no language model head"
            raise ConfigError(f"{what}; load it with AutoModelForCausalLM")
        return cls(compat.num_logits(model), compat.num_embeddings(model), end_tokens(model))


@dataclass(eq=False)
class TrainingTurns:
    """Hands the model of an engine's runner to training, and takes it up again.

    `renew` makes a new `runner` of a changed model, in place of a closed one.
    """

    model: Any
    vocabulary: Vocabulary
    runner: ModelRunner
    renew: Callable[[], ModelRunner]
    is_paused: bool = False
    _checksums: list[int] | None = None
    #: Restores the modes of training's last turn.
    _modes: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def pause(self, *, compares_values: bool) -> None:
        """Restore the model's own code, and the modes that it had in the last pause. Idempotent.

        Raises `ConfigError` if another engine has moved the weights to host memory.
        """
        if self.is_paused:
            return
        check_awake(self.model)
        self._checksums = checksums_of(self.model) if compares_values else None
        self.runner.pause()
        self._modes.close()
        self.is_paused = True

    def resume(self) -> bool:
        """Serve the model again, in eval mode; returns whether cached prefixes are out of date.

        They are if compared values differ, or layers are not those of before. Raises `ConfigError`
        if the model can no longer be served; training then keeps it.
        """
        torch.cuda.empty_cache()  # The pool cannot have what training left there.
        with eval_mode(self.model) as modes:
            vocabulary = Vocabulary.of(self.model)
            unmerge_disabled(self.model)
            before = self._checksums
            is_changed = before is not None and before != checksums_of(self.model)
            if self.runner.is_current():
                self.runner.resume()
            else:
                self.runner.close()
                self.runner, is_changed = self.renew(), True
            self.vocabulary = vocabulary
            self._modes, self.is_paused = modes.pop_all(), False
        return is_changed


def renewed_runner(
    model: Any, rows: ServedRows, given: EngineOptions, weights: Weights | None
) -> ModelRunner:
    """Make a runner for a model that was changed; `ConfigError` if its rows do not fit any more."""
    proof = prove(model, given.attention_backend, given.kv_dtype)
    if proof.signatures != rows.signatures or _comparable(proof) != _comparable(rows):
        raise ConfigError(
            "the model's layers have other keys and values than when its engine was made: undo the "
            "change and leave engine.paused() again, or close the engine and make another"
        )
    pool = rows.cache.pool
    budget_bytes = pool.budget_bytes
    runner = make_runner(model, rows, given, weights)
    if pool.member is None:  # Else a broker decides.
        pool.set_budget(budget_bytes)  # `OwnBudget` follows what is free.
    return runner


def _comparable(made: Proof | ServedRows) -> object:
    states = made.calls.states.items()
    return made.calls._replace(states={}), {at: (*each.shapes.items(),) for at, each in states}


# ---- vocabulary ----------------------------------------------------------------------------------


def end_tokens(model: Any) -> frozenset[int]:
    """Return the model's end-of-sequence tokens, as `model.generate` determines them.

    A generation config takes precedence: None there means no token. `ConfigError` unless integers.
    """
    config = getattr(model, "generation_config", None) or model.config
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return frozenset()
    try:
        return frozenset(map(operator.index, [ends] if isinstance(ends, int) else ends))
    except TypeError as error:  # For instance a text, whose digits would be tokens.
        raise ConfigError(
            f"the model's eos_token_id is {shown(ends)}: neither a token nor a list of tokens"
        ) from error
