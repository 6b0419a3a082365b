"""What a machine keeps of itself and of those that it is paired with, for both halves."""
