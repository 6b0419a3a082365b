"""The engine: the MLX thread, and everything that decodes."""
