"""The decoder: OpenAI endpoint, MLX, sessions and tiers, on the Mac."""
