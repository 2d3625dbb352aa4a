"""The baselines.  A peer that is not here yields the reason instead of itself, and the report says so."""
