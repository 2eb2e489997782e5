"""Fixtures of the command line's tests: no network, and single-threaded tiny models."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
