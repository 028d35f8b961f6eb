"""The ways to take one training step that the benchmarks hold against each other, and what they train."""
