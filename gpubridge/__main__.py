"""``python -m gpubridge`` is the command ``gpubridge``."""

import sys

from gpubridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
