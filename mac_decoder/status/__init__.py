"""What the decoder tells of itself: gathered here, in the form of ``protocol/status``."""
