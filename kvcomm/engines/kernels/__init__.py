"""Between the KV caches of engines on a GPU and block payloads: fused copies that change the layout.

``layouts`` says where an engine keeps which row, ``paging`` moves the bytes (a Triton kernel on a GPU, plain
torch everywhere and as its oracle).  Triton is imported when a kernel is first run.
"""
