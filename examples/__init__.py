"""Runnable examples; not part of what is installed."""
