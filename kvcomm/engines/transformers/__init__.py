"""KVCOMM in Hugging Face transformers: name a model's KV, move it between caches and blocks, read with it.

    session = Session(model, tokenizer, kv)
    reading = session.read("the shared context ...")   # fetches what anybody computed, prefills the rest
    print(session.generate(32).text)

``namespace_of`` is the identity of a loaded model's KV, ``blocks_of`` and ``cache_from`` convert between a
cache and payloads of layout ``LKHTD`` = [layer, K or V, kv head, token, head dim].

Contexts that are compacted while they are written (``kvcomm.streams``) are computed by ``streaming``, written
by ``generating`` and run again by ``replaying``, which are imported by name: they need more of torch.
"""

from kvcomm.engines.transformers.cache import blocks_of, cache_from
from kvcomm.engines.transformers.identity import Adapter, UnsupportedModel, namespace_of
from kvcomm.engines.transformers.session import Fetcher, Generation, Reading, Session

__all__ = [
    "Adapter",
    "Fetcher",
    "Generation",
    "Reading",
    "Session",
    "UnsupportedModel",
    "blocks_of",
    "cache_from",
    "namespace_of",
]
