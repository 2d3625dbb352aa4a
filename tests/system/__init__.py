"""Whole clusters of real processes, through the public client and the command line."""
