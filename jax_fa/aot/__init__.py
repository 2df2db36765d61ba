"""The build: kernels compiled ahead of time. ``python -m jax_fa.aot``."""
