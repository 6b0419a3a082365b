"""The decoder: OpenAI endpoint, MLX and the link to a producer, on the Mac."""
