"""What the commands of `mmnnx` end with, apart from 0 and 128 + the number of a signal."""

FAILED = 1
"""A process of several failed, or a plan does not fit."""

MISTAKE = 2
"""A mistake in the arguments, or in a file that they name."""

DIVERGED = 3
"""The loss of a training run became infinite or NaN."""
