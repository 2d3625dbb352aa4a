"""What an operator may write, what it means, and what the refusal says."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from controller.policies.table import NAMES as POLICIES
from kvcomm.config import Config, parse_config, reference, settings
from kvcomm.errors import ConfigError
from kvcomm.validators import Rule

ROOT = Path(__file__).resolve().parents[2]
RAM = 16_000_000_000


def parse(text: str) -> Config:
    return parse_config(text, ram_bytes=RAM)


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value).splitlines()


def setting(path: str, value: object) -> str:
    section, key = path.split(".")
    return yaml.safe_dump({section: {key: value}})


def test_nothing_said_means_the_defaults() -> None:
    config = parse("")
    assert config.cache.l1_size_bytes == 10**9
    assert config.cache.l1_negative_ttl_s == 5.0
    assert config.cache.l2_size_bytes == RAM // 4
    assert config.cache.l2_pin_budget_bytes == RAM // 8
    assert config.network.zero_copy_threshold_bytes == 4000
    assert config.network.transports == ("shm", "cuda", "verbs", "tcp")
    assert (config.cluster.replicas, config.cluster.write_quorum, config.cluster.read_quorum) == (3, 2, 1)
    assert config.storage.fsync == "always"
    assert config.security.tenant == "default"


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "cache:\n", "{}", "cache: {}\nnetwork:\n"])
def test_ways_to_say_nothing(text: str) -> None:
    assert parse(text) == parse("")


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (4096, 4096),
        ("4096B", 4096),
        ("1KB", 1000),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("1.5 MB", 1_500_000),
        ("4.1KB", 4100),
        ("2GiB", 2 << 30),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
        ("15%", 2_400_000_000),
        ("12.5%", 2_000_000_000),
        ("100%", RAM),
    ],
)
def test_sizes(written: object, size_bytes: int) -> None:
    assert parse(setting("cache.l1_size", written)).cache.l1_size_bytes == size_bytes


@pytest.mark.parametrize(
    ("written", "ttl_s"),
    [("5s", 5.0), ("50ms", 0.05), ("2m", 120.0), ("1h", 3600.0), ("200us", 2e-4), ("0s", 0.0)],
)
def test_durations(written: str, ttl_s: float) -> None:
    assert parse(setting("cache.l1_negative_ttl", written)).cache.l1_negative_ttl_s == pytest.approx(ttl_s)


@given(
    number=st.integers(1, 10**6),
    unit=st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]),
)
def test_sizes_equal_the_arithmetic(number: int, unit: str) -> None:
    base, power = (1024 if "i" in unit else 1000), "BKMGT".index(unit[0])
    parsed = parse(setting("cache.l1_size", f"{number}{unit}"))
    assert parsed.cache.l1_size_bytes == number * base**power


@pytest.mark.parametrize(
    ("path", "written", "says"),
    [
        ("cache.l1_size", -1, "is -1, but bytes must be at least 0"),
        ("cache.l1_size", 0, "leaves no room at all"),
        ("cache.l1_size", "-1GB", "is '-1GB', expected bytes"),
        ("cache.l1_size", "1 gigabyte", 'or a share such as "15%"'),
        ("cache.l1_size", "101%", "at most 100%"),
        ("cache.l1_size", 1.5, "is 1.5, expected bytes"),
        ("cache.l1_size", True, "is True, expected bytes"),
        ("cache.l1_size", None, "is empty, expected bytes"),
        ("cache.l1_size", ["1GB"], "expected bytes"),
        ("cache.l1_negative_ttl", 5, "a duration with its unit"),
        ("cache.l1_negative_ttl", "5", "a duration with its unit"),
        ("cache.l1_negative_ttl", "-5s", "a duration with its unit"),
        ("cache.reservation_ttl", "0s", "no time at all"),
        ("cache.l1_negative_entries", "many", "a whole number"),
        ("cache.l1_negative_entries", -1, "at least 0"),
        ("cache.l3_consistency", "strong", "kv.strong"),
        ("cache.l3_consistency", "stronk", "expected one of eventual"),
        ("cache.l2_device", "cuda", 'expected "host" or a GPU'),
        ("cache.l2_device", 0, 'expected "host" or a GPU'),
        ("network.zero_copy_threshold", "15%", "expected bytes"),
        ("network.transports", [], "a list without repetition"),
        ("network.transports", "shm", "a list without repetition"),
        ("network.transports", ["shm", "shm"], "a list without repetition"),
        ("network.transports", ["shm", "tpc"], "names 'tpc', expected some of shm, cuda, verbs, tcp"),
        ("network.transports", ["shm", ["tcp"]], "names ['tcp']"),
        ("network.listen_host", "0.0.0.0", "name one that they reach"),
        ("network.listen_host", "::", "name one that they reach"),
        ("network.listen_host", "0::0", "name one that they reach"),
        ("network.listen_host", "10.0.0.1/24", "without a port"),
        ("network.listen_host", "10.0.0.1:7000", "without a port"),
        ("network.listen_host", "", "without a port"),
        ("network.rdma_device", 1, "expected text"),
        ("cluster.shards", 0, "at least 1"),
        ("cluster.shards", True, "a whole number"),
        ("cluster.replicas", 4, "cluster.shards is 3"),
        ("cluster.write_quorum", 4, "cluster.replicas is 3"),
        ("cluster.read_quorum", 4, "cluster.replicas is 3"),
        ("cluster.block_copies", 4, "cluster.shards is 3"),
        ("cluster.hint_age", "24h", "hints must be given up first"),
        ("cluster.hint_bytes", "1%", "expected bytes"),
        ("cluster.repair_interval", "0s", "no time at all"),
        ("cluster.controllers", 2, "there are 1, 3, 5: a majority"),
        ("cluster.controllers", 0, "there are 1, 3, 5"),
        ("cluster.controller_addresses", ["unix:///a"], "expected addresses such as tcp://"),
        ("cluster.controller_addresses", ["tcp://h:0"], "expected addresses such as tcp://"),
        ("cluster.controller_addresses", ["tcp://h:1", "tcp://h:1"], "without repetition"),
        ("cluster.controller_addresses", ["tcp://h:1", "tcp://i:1"], "names 2, but cluster.controllers is 1"),
        ("cluster.lease", "10ms", "lasts 0.5 to 600 s"),
        ("cluster.balance", "fair", f"expected one of none, {', '.join(POLICIES)}"),
        ("cache.l2_pin_budget", RAM, "but cache.l2_size is"),
        ("storage.fsync", False, "expected one of always, interval, never"),
        ("storage.directory", 3, "expected text"),
        ("security.tenant", "a:b", "without ':'"),
        ("security.tenant", "", "not empty"),
    ],
)
def test_a_refusal_names_the_key_and_says_what_was_expected(path: str, written: object, says: str) -> None:
    (line,) = refusal(setting(path, written))
    assert line.startswith(f"{path} ")
    assert says in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cache: {l1_sise: 1}", "unknown key cache.l1_sise, did you mean cache.l1_size?"),
        ("cach: {l1_size: 1}", "unknown key cach, did you mean cache?"),
        ("cache: {replicas: 1}", "unknown key cache.replicas, did you mean cluster.replicas?"),
        ("l1_size: 1GB", "unknown key l1_size, did you mean cache.l1_size?"),
        ("network: {qqqq: 1}", "unknown key network.qqqq; known here: zero_copy_threshold"),
        ("cache: {l2_sync_interval: 50ms}", "cache.l2_sync_interval is known but not in this version"),
        ("cache: 1GB", "cache must be a section with keys, got str"),
        ("cache: {l1_size: 1GB, l1_size: 2GB}", "cache.l1_size is set twice"),
        ("cache: {}\ncache: {}", "cache is set twice (second time on line 2)"),
        ("[1, 2]", "must be sections with keys, got list"),
        ("just text", "must be sections with keys, got str"),
        ("cache: [", "not YAML"),
        ("cache: {[a]: 1}", "cache has a key that is not plain text"),
        ("a: &a [*a]", "unknown key a"),
        ("cache: !!python/object:os.system {}", "not YAML"),
        ("3: 4", "unknown key 3"),
    ],
)
def test_text_that_cannot_be_used(text: str, says: str) -> None:
    assert any(says in line for line in refusal(text))


def test_all_problems_are_told_at_once() -> None:
    lines = refusal("cache: {l1_size: nope, l2_size: -1}\nnetwork: {transport: [shm]}\ncluster: {shards: 0}")
    assert [line.split(" is ")[0].split(",")[0] for line in lines] == [
        "cache.l1_size",
        "cache.l2_size",
        "unknown key network.transport",
        "cluster.shards",
    ]


@pytest.mark.parametrize(("shards", "replicas", "write_quorum"), [(1, 1, 1), (2, 2, 2), (3, 3, 2), (5, 3, 2)])
def test_quorums_follow_the_size_of_the_cluster(shards: int, replicas: int, write_quorum: int) -> None:
    cluster = parse(setting("cluster.shards", shards)).cluster
    assert (cluster.replicas, cluster.write_quorum) == (replicas, write_quorum)


def test_the_write_quorum_follows_the_replicas() -> None:
    assert parse("cluster: {shards: 5, replicas: 5}").cluster.write_quorum == 3


def test_the_pin_budget_is_a_share_of_the_pool() -> None:
    config = parse("cache: {l2_size: 1GB, l2_pin_budget: 25%}")
    assert config.cache.l2_pin_budget_bytes == 250_000_000


def test_a_pool_in_gpu_memory_needs_the_wire_that_reaches_it() -> None:
    said = "{transports: [cuda, tcp]}"
    assert parse(f"cache: {{l2_device: 'cuda:1'}}\nnetwork: {said}").cache.l2_device == 1
    assert parse("cache: {l2_device: host}").cache.l2_device is None
    (line,) = refusal("cache: {l2_device: 'cuda:1'}\nnetwork: {transports: [shm, tcp]}")
    assert "network.transports has no cuda" in line


def test_every_transport_of_the_design_may_be_named() -> None:
    assert parse("network: {transports: [shm, cuda, verbs, tcp]}").network.transports == (
        "shm",
        "cuda",
        "verbs",
        "tcp",
    )


def test_the_example_shows_every_key_with_its_default() -> None:
    text = (ROOT / "kvcomm.example.yaml").read_text()
    assert parse(text) == parse("")
    written = {f"{section}.{key}" for section, keys in yaml.safe_load(text).items() for key in keys}
    assert written == {path for path, _ in settings()}


def test_the_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == reference(), "run scripts/gen-docs"


def test_every_setting_says_its_consequence_and_has_its_unit_last() -> None:
    config = parse("")
    for section in fields(config):
        assert is_dataclass(getattr(config, section.name))
    for path, declared in settings():
        assert len(declared.means) > 20, path
        written = str(declared.default)
        attribute = next(
            each.name
            for each in fields(getattr(config, path.split(".")[0]))
            if each.metadata["setting"] is declared
        )
        if written.endswith(("%", "B")):
            assert attribute == f"{declared.key.removesuffix('_bytes')}_bytes"
        elif written[:1].isdigit() and written.endswith(("s", "m", "h")):
            assert attribute == f"{declared.key}_s"
        else:
            assert attribute == declared.key


def test_validators_are_rules() -> None:
    text = """
records:
  validators:
    - {names: "counter/budget/*", min: 0}
    - {names: "set/tags/*", count_max: 100, value_bytes_max: "1KiB"}
"""
    assert parse(text).records.validators == (
        Rule("counter/budget/*", min=0),
        Rule("set/tags/*", count_max=100, value_bytes_max=1024),
    )


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("x", "a list of rules"),
        ([1], "a list of rules"),
        ([{"names": "state/a/b"}], "rule 1: state/a/b: the rule says nothing"),
        ([{"names": "state/a/b", "value_bytes_max": "wide"}], "rule 1: is 'wide'"),
        ([{1: 2}], "rule 1: a rule has no 1"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_number(written: object, says: str) -> None:
    [problem] = refusal(yaml.safe_dump({"records": {"validators": written}}))
    assert problem.startswith("records.validators") and says in problem
