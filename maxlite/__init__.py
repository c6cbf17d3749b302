"""LLM pre-training in JAX whose checkpoints never lose work."""

__version__ = "0.1.0"
