"""Frozen bytes of every wire version."""
