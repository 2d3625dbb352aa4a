"""Adapters between inference engines and KVCOMM; the only package of the floor that imports ``torch``.

Engine interfaces move, so each engine is met in one subpackage and nothing else of KVCOMM names it.  Import
them explicitly (``from kvcomm.engines import transformers``): ``import kvcomm`` never pulls an engine in.
"""
