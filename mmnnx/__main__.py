"""``python -m mmnnx`` is the command ``mmnnx``."""

import sys

from mmnnx.cli import main

sys.exit(main())
