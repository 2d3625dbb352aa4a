"""Load policies: from what the shards do to who should keep which keys.  All through one port,
``plan(view) -> list[Move]``.

Pure; may import `l3_shard.ring` and `kvcomm`.
"""
