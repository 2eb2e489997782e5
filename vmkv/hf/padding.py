"""The left padding of a batch that decodes: read from its mask once, and then only checked.

Each step of `generate` comes with the mask of the step before and a column of ones. To read it
would be to wait for the device in every step; to trust it would be wrong with whoever masks
otherwise. So it is compared on the device with what it should be, and the host looks at the result
when it has come, which is one step later.
"""

from __future__ import annotations

import torch

from ..errors import ConfigError


def read_left_pad(mask: torch.Tensor) -> tuple[bool, bool, torch.Tensor]:
    """Whether `mask [B, T]` is 0 … 0 1 … 1 in every row, whether it has any 0, and how many.

    The last is `[B] int32`. Asks the device.
    """
    num_tokens = mask.shape[1]
    left_pad = num_tokens - mask.sum(1, dtype=torch.int32)
    at = torch.arange(num_tokens, device=mask.device)
    is_left = (mask == (at >= left_pad[:, None])).all() & (left_pad < num_tokens).all()
    is_left_padding, has_any = torch.stack([is_left, left_pad.any()]).tolist()
    return is_left_padding, has_any, left_pad


class LeftPadding:
    """What the masks of one batch say.

    Args:
        left_pad: `[B] int32`, where its masks are.
        dtype: Of the masks.

    Attributes:
        left_pad: Leading tokens of each row that nothing attends to; None for none.
    """

    def __init__(self, left_pad: torch.Tensor, dtype: torch.dtype, *, has_any: bool):
        device = left_pad.device
        self.left_pad = left_pad if has_any else None
        self._starts = left_pad[:, None]
        self._expected = torch.empty((left_pad.shape[0], 0), dtype=dtype, device=device)
        self._differs = torch.zeros((), dtype=torch.bool, device=device)
        self._seen = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")
        self._seen_on_host = self._seen.numpy()

    @classmethod
    def read(cls, mask: torch.Tensor) -> LeftPadding | None:
        """What `mask [B, T]` says; None where it is no left padding. Asks the device."""
        # Ordinary tensors: later masks may come in another mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            is_left_padding, has_any, left_pad = read_left_pad(mask)
            return cls(left_pad, mask.dtype, has_any=has_any) if is_left_padding else None

    def check(self, mask: torch.Tensor) -> None:
        """Have a later mask compared, and see what comparing earlier ones has brought.

        Args:
            mask: `[B, T]`, of as many rows.

        Raises:
            ConfigError: An earlier one was another. Then the step that came with it, mostly the
                last, attended to other tokens than it asked for.

        Cost: four small launches; never waits.
        """
        self.look()
        num_tokens = mask.shape[1]
        if num_tokens > self._expected.shape[1]:
            with torch.inference_mode(mode=False), torch.no_grad():
                at = torch.arange(2 * num_tokens, device=mask.device)
                self._expected = (at >= self._starts).to(mask.dtype)
        differs = torch.ne(mask, self._expected[:, :num_tokens]).any()
        self._differs.logical_or_(differs)
        self._seen.copy_(self._differs, non_blocking=True)

    def look(self) -> None:
        """See what has come of earlier checks; raises what `check` does."""
        if self._seen_on_host[()]:
            raise ConfigError(
                "the attention mask of a captured decode step was not the one of the step before "
                "with a column of ones, as model.generate makes it: tokens since then attended to "
                "others than it says. Decode with such masks without capture_decoding, or pass "
                "more than one token where the mask changes"
            )
