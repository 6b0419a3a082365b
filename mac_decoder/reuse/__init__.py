"""What is kept of prompts, what may be served of it, and what that saved. No mlx in here."""
