"""Models and machine code of what was compiled: ``python -m jax_fa.analysis``."""
