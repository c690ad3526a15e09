"""``python -m torch_ckpt``: the command ``torch-ckpt``."""

import sys

from torch_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
