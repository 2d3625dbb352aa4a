"""What is computed on the K/V of engines where it lies, on a GPU.

``layouts`` says where an engine keeps which row, ``paging`` moves bytes between caches and block payloads in
fused copies that change the layout, ``attention`` attends paged memory without a copy.  Each is a Triton
kernel on a GPU, and plain torch everywhere and as its oracle; Triton is imported when one is first run.
"""
