"""``python -m kvcomm.cli``: the same as ``kvcomm``, for processes that start each other."""

from kvcomm.cli import main

main()
