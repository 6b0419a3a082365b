"""Two peers joined in memory."""
