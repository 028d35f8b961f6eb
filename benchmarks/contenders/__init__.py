"""The ways to run one training step that the benchmarks compare, and the models that they train."""
