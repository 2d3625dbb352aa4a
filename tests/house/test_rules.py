"""Every rule of the house: the repository obeys it, it reports a bad snippet, it spares a good one."""

import pytest

from tests.house.rules import RULES, Rule
from tests.house.source import shipped_sources, source

_BAD = [
    pytest.param(rule, *snippet, id=f"{rule.name}-{n}")
    for rule in RULES
    for n, snippet in enumerate(rule.bad)
]
_GOOD = [
    pytest.param(rule, *snippet, id=f"{rule.name}-{n}")
    for rule in RULES
    for n, snippet in enumerate(rule.good)
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_repository_obeys(rule: Rule) -> None:
    broken = [
        f"{each.path}:{finding.line}: {finding.message}"
        for each in shipped_sources()
        if each.is_pure() or not rule.pure_only
        for finding in rule.find(each)
    ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(("rule", "path", "text"), _BAD)
def test_the_rule_reports(rule: Rule, path: str, text: str) -> None:
    assert list(rule.find(source(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), _GOOD)
def test_the_rule_spares(rule: Rule, path: str, text: str) -> None:
    assert list(rule.find(source(path, text))) == []


def test_there_is_something_to_judge() -> None:
    """A wrong root would make every rule pass on nothing."""
    assert {each.module for each in shipped_sources()} >= {
        "kvcomm",
        "l1",
        "l2_rdma",
        "l3_shard",
        "controller",
    }
