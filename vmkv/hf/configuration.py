"""Read from a model's configuration its layers, its longest sequence and the sizes of a cache.

Models that packed batches cannot serve are refused here, as far as the configuration shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.cache.geometry import fitting_rows
from ..errors import ConfigError
from . import compat

if TYPE_CHECKING:
    from .store import CacheOptions

# ---- unservable ----------------------------------------------------------------------------------


class UnservableError(ConfigError):
    """A packed batch cannot serve the model; `generate` and `Engine` refuse it before it runs.

    The message ends in "cannot be served in a packed batch: {why}; {instead}".
    """

    def __init__(
        self,
        why: str,
        name: str = "this model",
        instead: str = f"generate with {compat.CACHE_NAME}=VMKVCache(config) instead",
    ):
        super().__init__(f"{name} cannot be served in a packed batch: {why}; {instead}")
        self.why = why

    def of(self, model: Any) -> UnservableError:
        """Return this error with the model's name, and an alternative that serves it."""
        instead = "use model.generate without a cache of ours instead"
        alternatives = () if compat.takes_cache(model) else (instead,)
        return UnservableError(self.why, type(model).__name__, *alternatives)


def check_length(config: Any, max_tokens: int | None) -> None:
    """Refuse sequences that would change the rotary angles of others in their pass."""
    limit = compat.rope_limit_tokens(config)
    if limit is not None and (max_tokens is None or max_tokens > limit):
        raise ConfigError(
            f"beyond {limit} tokens, one sequence changes the rotary embedding of all that it is "
            f"packed with, and these may reach {max_tokens or 'any length'}: end them at {limit} "
            f"tokens at most, or generate with {compat.CACHE_NAME}=VMKVCache(config) instead"
        )


# ---- layers --------------------------------------------------------------------------------------


def layer_windows(config: Any) -> dict[int, int | None]:
    """Return the window in tokens, or None, of layers with keys; may raise `UnservableError`."""
    decoder = compat.text_config(config)
    layers = compat.default_cache(config).layers
    if len(layers) != getattr(decoder, "num_hidden_layers", len(layers)):
        raise UnservableError("layers share keys and values, which only a cache can hand on")
    windows: dict[int, int | None] = {}
    for index, layer in enumerate(layers):
        is_ours, window = compat.window_of(layer)
        if is_ours or compat.keys_beside_state(layer):
            windows[index] = window
        elif not compat.is_known(layer):
            raise UnservableError(
                f"its layer {index} is a {type(layer).__name__}, whose state is not keys and "
                "values of its own"
            )
    if not windows:
        raise UnservableError("none of its layers keeps keys and values")
    return windows


def layer_chunks(config: Any) -> dict[int, int]:
    """Return the tokens of a chunk of each layer that sees no token before its query's chunk."""
    decoder = compat.text_config(config)
    return {
        index: int(decoder.attention_chunk_size)
        for index, kind in enumerate(getattr(decoder, "layer_types", None) or ())
        if kind == "chunked_attention"
    }


# ---- sizes ---------------------------------------------------------------------------------------

_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_sequence_length",
    "seq_length",
)
#: Generous, because reserved addresses cost no memory. As in transformers, models may run past the
#: length that they were trained for.
_MAX_TOKENS_FLOOR = 32 * 1024
_MAX_BATCH_SIZE = 256


def default_max_tokens(decoder_config: Any, *, past_stated: bool = True) -> int:
    """Return twice the stated length, at least 32k; the stated one unless `past_stated`."""
    stated = stated_max_tokens(decoder_config)
    if not past_stated:
        return compat.rope_limit_tokens(decoder_config) or stated or _MAX_TOKENS_FLOOR
    return max(_MAX_TOKENS_FLOOR, 2 * (stated or 0))


def stated_max_tokens(decoder_config: Any) -> int | None:
    """Return the longest sequence that a model was made for; None if the configuration has none."""
    lengths = [getattr(decoder_config, name, None) for name in _LENGTH_NAMES]
    stated: list[int] = [length for length in lengths if length is not None]
    for length in stated:
        if isinstance(length, bool) or not isinstance(length, int) or length <= 0:
            raise ConfigError(
                f"the model's configuration states a length of {length!r}; pass max_tokens"
            )
    return max(stated, default=None)


def rows_and_tokens(
    batch_size: int, token_bytes: int, options: CacheOptions, max_tokens: int
) -> tuple[int, int]:
    """Return rows and tokens to reserve: given values stay, the others shrink until both fit."""
    rows = options.max_batch_size
    if rows is None:
        wanted_rows = max(batch_size, _MAX_BATCH_SIZE)
        rows = max(batch_size, fitting_rows(token_bytes, max_tokens, wanted_rows))
    elif batch_size > rows:
        raise ConfigError(
            f"a batch of {batch_size} does not fit max_batch_size={rows}; make the cache with a "
            "larger one"
        )
    if options.max_tokens is None:
        while max_tokens > 1 and fitting_rows(token_bytes, max_tokens, rows) < rows:
            max_tokens //= 2
    return rows, max_tokens
