"""Nothing is declared that does nothing: every metric is counted, every setting is read."""

import ast
from collections.abc import Iterator
from dataclasses import fields

from kvcomm.config import Config
from kvcomm.metrics import DEFINITIONS
from tests.house.source import Source, shipped_sources, source

SINGLE_CHOICE = {"cache.l3_consistency"}
"""Settings with one value to choose from in this version: there is nothing to read."""


def _told(node: ast.AST) -> Iterator[str]:
    """Every text in the code but those of the table of metrics."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Definition":
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _told(child)


def _uncounted(sources: tuple[Source, ...], names: list[str]) -> list[str]:
    told = {text for each in sources for text in _told(each.tree)}
    return sorted(set(names) - told)


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _aliases(tree: ast.AST, section: str) -> set[str]:
    """Names that stand for the section: ``counts = settings.cluster``."""
    named = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == section
    }
    return {section, *named}


def _unread(sources: tuple[Source, ...], settings: list[tuple[str, str]]) -> list[str]:
    read: set[tuple[str, str]] = set()
    for each in sources:
        for section in {section for section, _ in settings}:
            names = _aliases(each.tree, section)
            for node in ast.walk(each.tree):
                if isinstance(node, ast.Attribute) and _last_name(node.value) in names:
                    read.add((section, node.attr))
    return sorted(f"{section}.{name}" for section, name in set(settings) - read)


def _settings() -> list[tuple[str, str]]:
    return [
        (section.name, each.name)
        for section in fields(Config)
        for each in fields(section.metadata["section"])
    ]


def test_every_metric_is_counted_somewhere() -> None:
    assert _uncounted(shipped_sources(), [each.name for each in DEFINITIONS]) == []


def test_every_setting_has_a_reader() -> None:
    readers = tuple(each for each in shipped_sources() if each.module != "kvcomm.config")
    assert set(_unread(readers, _settings())) == SINGLE_CHOICE


def test_a_metric_that_stands_in_the_table_only_is_found() -> None:
    table = source("kvcomm/a.py", 'D = (Definition("kvcomm_a_total"), Definition("kvcomm_b_total"))\n')
    user = source("kvcomm/b.py", 'def count(m):\n    m.counter("kvcomm_b_total").add()\n')
    assert _uncounted((table, user), ["kvcomm_a_total", "kvcomm_b_total"]) == ["kvcomm_a_total"]


def test_a_setting_of_another_section_is_no_reader() -> None:
    user = source(
        "kvcomm/b.py", "def use(s, record):\n    c = s.cache\n    return c.l1, s.network.t, record.d\n"
    )
    wanted = [("cache", "l1"), ("network", "t"), ("storage", "d"), ("cache", "t")]
    assert _unread((user,), wanted) == ["cache.t", "storage.d"]
