"""Runs the command as `python -m vmkv.cli`, if the `vmkv` script is not on the path."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
