"""The tests mirror the tree.

This file keeps the name `tests` ours where a dependency ships a package so named.
"""
