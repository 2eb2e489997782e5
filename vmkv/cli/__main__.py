"""`python -m vmkv.cli`, for where the `vmkv` script is not on the path."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
