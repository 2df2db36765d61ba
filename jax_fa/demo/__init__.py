"""Trains a small Flax GPT on text: ``python -m jax_fa.demo``."""
