"""The commands: composition root of every process that is not an agent.

One file a command; each imports what it needs inside the function, so that ``kvcomm --help`` stays quick and
a pool or shard process loads neither torch nor the launcher.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of ``kvcomm``.  Exit codes: 0 done, 1 an operating failure, 2 the caller's mistake."""
    from kvcomm.cli.app import app
    from kvcomm.errors import KVCommError

    try:
        app()
    except KVCommError as error:
        sys.exit(_say(f"{error.code}: {error.message}", 1))
    except ValueError as error:  # the floor's caller mistakes: configuration, names, namespaces
        sys.exit(_say(str(error), 2))


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"kvcomm: {text}\n")
    return code
