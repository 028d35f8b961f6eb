"""``python -m mmnnx`` is the command ``mmnnx``."""

import sys

from mmnnx.train.cli import main

sys.exit(main())
