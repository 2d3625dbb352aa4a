"""docs/transports.md names the tests that hold what it says: they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)(?:::(test_\w+))?|(test_\w+))`")


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs/transports.md").read_text()
    suite = "\n".join(
        path.read_text() for path in sorted((ROOT / "tests/contracts/transports").glob("test_*.py"))
    )
    named = _NAMED.findall(page)

    assert len(named) > 10
    for path, inside, alone in named:
        text = (ROOT / path).read_text() if path else suite
        name = inside or alone
        assert not name or f"def {name}(" in text, f"there is no {name} in {path or 'the contract suite'}"
