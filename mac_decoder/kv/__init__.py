"""The only code that turns mlx-lm caches into rows and states, and back; one file per kind."""
