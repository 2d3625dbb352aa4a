"""``Config``: what an operator may set, parsed once from YAML text into frozen dataclasses.

Each setting is declared in one place, its field: YAML key, parser, default and consequence.  The
documentation page and the tests are made from these declarations (:func:`reference`), so a setting cannot
exist without saying what it does.

Sizes are whole bytes, ``"1GB"`` (10^9), ``"1GiB"`` (2^30), or for the caches a share of this machine's
memory, ``"15%"``.  Durations always name their unit: ``"5s"``, ``"50ms"``, ``"2m"``.

Pure: reading files and finding out how much memory there is are ``kvcomm.settings``'s.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, NoReturn

from kvcomm.errors import ConfigError
from kvcomm.validators import Rule, rule_of

FILTER_AGE_MAX_S = 10.0
HOT_AGE_MAX_S = 1.0
TRANSPORTS = ("shm", "cuda", "verbs", "tcp")
CONTROLLERS = (1, 3, 5)
LEASE_S_MIN, LEASE_S_MAX = 0.5, 600.0
"""Of the controllers: below, a busy disk would end it again and again."""

_PLANNED = {
    "cache.l2_sync_interval": "record writes are sent at once, there is nothing to aggregate yet",
}
"""Keys of the design that nothing reads yet.  A key that is accepted and does nothing would be a lie."""


def parse_config(text: str, *, ram_bytes: int) -> Config:
    """The configuration that ``text`` (YAML) describes; what it leaves out has its default.

    Args:
        ram_bytes: memory that percentages refer to.

    Raises:
        ConfigError: every problem found, one a line, each with the full path of its key.
    """
    problems: list[str] = []
    document = _document(text)
    _check_keys(document, list(_sections()), "", problems)
    parsed = {
        name: _section(section, name, document.get(name), ram_bytes, problems)
        for name, section in _sections().items()
    }
    if problems:
        raise ConfigError("\n".join(problems))
    config = Config(**parsed)
    problems.extend(_contradictions(config))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


# -- how a value is written ----------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B|%)", re.IGNORECASE)
_SIZE_BYTES: dict[str, int] = {"b": 1, "%": 0} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h)")
_DURATION_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Parser = Callable[[Any, int], Any]
"""``parser(value, ram_bytes)``: the typed value, or ``ValueError`` saying what was expected."""


def _size(value: Any, whole_bytes: int, *, percent: bool) -> int:
    expected = 'bytes, "512MB", "1GiB"' + (' or a share such as "15%"' if percent else "")
    if isinstance(value, int) and not isinstance(value, bool):
        return _at_least(value, 0, "bytes")
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if not found or (found[2] == "%" and not percent):
        _unlike(value, expected)
    number, unit = float(found[1]), str(found[2]).lower()
    if unit != "%":
        return round(number * _SIZE_BYTES[unit])
    if number > 100:
        raise ValueError(f"is {value}, but a share is at most 100%")
    return int(number * whole_bytes / 100)


def _bytes(value: Any, _ram_bytes: int) -> int:
    return _size(value, 0, percent=False)


def _bytes_or_share(value: Any, ram_bytes: int) -> int:
    size_bytes = _size(value, ram_bytes, percent=True)
    if not size_bytes:
        raise ValueError(f"is {value!r}, which leaves no room at all")
    return size_bytes


def _seconds(value: Any, _ram_bytes: int) -> float:
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if not found:
        _unlike(value, 'a duration with its unit: "5s", "50ms", "2m"')
    return float(found[1]) * _DURATION_S[str(found[2])]


def _filter_age(value: Any, _ram_bytes: int) -> float:
    seconds = _seconds(value, 0)
    if seconds > FILTER_AGE_MAX_S:
        raise ValueError(f"is {value!r}, but shards keep what they ruled in for {FILTER_AGE_MAX_S:g} s only")
    return seconds


def _hot_age(value: Any, _ram_bytes: int) -> float:
    seconds = _seconds(value, 0)
    if seconds > HOT_AGE_MAX_S:
        raise ValueError(f"is {value!r}, but what a read shows is at most {HOT_AGE_MAX_S:g} s old")
    return seconds


def _positive_seconds(value: Any, _ram_bytes: int) -> float:
    seconds = _seconds(value, 0)
    if not seconds:
        raise ValueError("is 0, but nothing can be done in no time at all")
    return seconds


def _count(value: Any, _ram_bytes: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        _unlike(value, "a whole number")
    return _at_least(value, 0, "a count")


def _positive_bytes(value: Any, ram_bytes: int) -> int:
    return _at_least(_bytes(value, ram_bytes), 1, "a size")


def _positive_count(value: Any, _ram_bytes: int) -> int:
    return _at_least(_count(value, 0), 1, "a count")


def _lease_seconds(value: Any, _ram_bytes: int) -> float:
    seconds = _seconds(value, 0)
    if not LEASE_S_MIN <= seconds <= LEASE_S_MAX:
        raise ValueError(f"is {value!r}, but a lease lasts {LEASE_S_MIN:g} to {LEASE_S_MAX:g} s")
    return seconds


def _controllers(value: Any, _ram_bytes: int) -> int:
    count = _count(value, 0)
    if count not in CONTROLLERS:
        raise ValueError(
            f"is {count}, but there are {', '.join(map(str, CONTROLLERS))}: a majority must be alive, which "
            "an even number makes less likely"
        )
    return count


def _addresses(value: Any, _ram_bytes: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(set(map(repr, value))) != len(value):
        _unlike(value, 'a list without repetition, such as ["tcp://10.0.0.1:7400"]')
    for each in value:
        found = re.fullmatch(r"tcp://[^\s/]+:(\d{1,5})", each) if isinstance(each, str) else None
        if found is None or not 0 < int(found[1]) < 1 << 16:
            raise ValueError(f"names {each!r}, expected addresses such as tcp://10.0.0.1:7400")
    return tuple(value)


def _truth(value: Any, _ram_bytes: int) -> bool:
    if not isinstance(value, bool):
        _unlike(value, "true or false")
    return value


def _text(value: Any, _ram_bytes: int) -> str:
    if not isinstance(value, str):
        _unlike(value, "text")
    return value


def _tenant(value: Any, _ram_bytes: int) -> str:
    if not isinstance(value, str) or not value or ":" in value:
        _unlike(value, "a tenant's name: not empty, without ':'")
    return value


def _device(value: Any, _ram_bytes: int) -> int | None:
    """The number of a GPU, ``None`` for the host."""
    found = re.fullmatch(r"host|cuda:(\d+)", value) if isinstance(value, str) else None
    if found is None:
        _unlike(value, '"host" or a GPU such as "cuda:0"')
    return int(found[1]) if found[1] is not None else None


def _host(value: Any, _ram_bytes: int) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.:-]+", value):
        _unlike(value, "a host name or an address, without a port")
    try:
        everywhere = ipaddress.ip_address(value).is_unspecified
    except ValueError:
        if ":" in value:  # a port, then; a name has no colon
            _unlike(value, "a host name or an address, without a port")
        return value
    if everywhere:
        raise ValueError(f"is {value!r}, but others are told this address: name one that they reach")
    return value


def _one_of(*choices: str, unavailable: Mapping[str, str] | None = None) -> Parser:
    def parse(value: Any, _ram_bytes: int) -> str:
        if isinstance(value, str) and value in choices:
            return value
        if unavailable and isinstance(value, str) and value in unavailable:
            raise ValueError(f"is {value!r}, {unavailable[value]}")
        _unlike(value, f"one of {', '.join(choices)}")

    return parse


def _transports(value: Any, _ram_bytes: int) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or len(set(map(repr, value))) != len(value):
        _unlike(value, f"a list without repetition of some of {', '.join(TRANSPORTS)}")
    for each in value:
        if each not in TRANSPORTS:
            raise ValueError(f"names {each!r}, expected some of {', '.join(TRANSPORTS)}")
    return tuple(value)


def _validators(value: Any, _ram_bytes: int) -> tuple[Rule, ...]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        _unlike(value, "a list of rules, each with names and what it demands")
    rules: list[Rule] = []
    for number, written in enumerate(value, start=1):
        try:
            sizes = {key: _bytes(written[key], 0) for key in ("value_bytes_max",) if key in written}
            rules.append(rule_of(written | sizes))
        except (ValueError, TypeError) as error:  # TypeError: a key that is no text
            raise ValueError(f"rule {number}: {error}") from error
    return tuple(rules)


def _at_least(value: int, least: int, what: str) -> int:
    if value < least:
        raise ValueError(f"is {value}, but {what} must be at least {least}")
    return value


def _unlike(value: Any, expected: str) -> NoReturn:
    shown = "empty" if value is None else repr(value)
    raise ValueError(f"is {shown if len(shown) < 60 else shown[:57] + '...'}, expected {expected}")


# -- what may be set -----------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One declaration."""

    key: str
    parse: Parser
    default: Any
    """As written in a file, so that the page and the parser cannot disagree about it."""
    means: str
    share_of: str = ""
    """The field that a percentage refers to; empty = memory."""
    default_from: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the default from the fields of the section that stand before this one."""


def _setting(key: str, parse: Parser, default: Any, means: str, **more: Any) -> Any:
    return field(metadata={"setting": Setting(key, parse, default, means, **more)})


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much each tier may hold, and for how long a claim lasts."""

    l1_size_bytes: int = _setting(
        "l1_size", _bytes_or_share, "1GB",
        "Blocks that one agent's process keeps at hand. Larger: more repeats cost no I/O. Views of the "
        "host's pool count here too and keep their slots pinned.",
    )  # fmt: skip
    l1_negative_ttl_s: float = _setting(
        "l1_negative_ttl", _seconds, "5s",
        "How long an agent takes a miss for granted without asking again. Longer: fewer useless questions, "
        "but a block published by somebody else in the meantime is noticed that much later. `0s` asks every "
        "time.",
    )  # fmt: skip
    l1_negative_entries: int = _setting(
        "l1_negative_entries", _count, 65536,
        "Misses remembered at most; the oldest is forgotten first. About 100 bytes each.",
    )  # fmt: skip
    l2_size_bytes: int = _setting(
        "l2_size", _bytes_or_share, "25%",
        "Shared memory of each host's pool, taken from /dev/shm at start. Larger: blocks live longer before "
        "they are evicted. It is refused at start if /dev/shm has not that much.",
    )  # fmt: skip
    l2_device: int | None = _setting(
        "l2_device", _device, "host",
        "Where pools keep blocks. `host`: in shared memory. `cuda:0`: in the memory of that GPU (of those "
        "that the pool's process sees), which then has `l2_size` taken from it at start; agents with a GPU "
        "copy from there at its speed, through the transport `cuda` alone: agents of other hosts and "
        "without a GPU find nothing in such a pool.",
    )  # fmt: skip
    l2_pin_budget_bytes: int = _setting(
        "l2_pin_budget", _bytes_or_share, "50%",
        "How much of the pool views may pin at once. At the bound readers get "
        "copies instead of views; a larger budget leaves less that can be evicted for new blocks.",
        share_of="l2_size_bytes",
    )  # fmt: skip
    l3_size_bytes: int = _setting(
        "l3_size", _bytes_or_share, "5%",
        "Memory for blocks in each shard, taken from /dev/shm at start. At the bound the least useful blocks "
        "are evicted.",
    )  # fmt: skip
    l3_filter_age_s: float = _setting(
        "l3_filter_age", _filter_age, "0s",
        "While most of what an agent asks the shards for is absent, it fetches a Bloom filter of each "
        "shard's blocks, and for so long asks for nothing that the filters rule out. It then notices a block "
        "that "
        "somebody else has published in the meantime that much later, also one that it never asked for. At "
        "most 10 s. `0s`: no filters.",
    )  # fmt: skip
    hot_record_age_s: float = _setting(
        "hot_record_age", _hot_age, "1s",
        "How old an eventual record may be that an agent reads again without asking, while the controllers "
        "find that very many read it: counted from before the question was sent, never past its own writes, "
        "and never for `kv.strong` or a read with `fresh=True`. At most 1 s. Longer: less load for the one "
        "shard that has the record. `0s`: every read asks.",
    )  # fmt: skip
    l3_consistency: Literal["eventual"] = _setting(
        "l3_consistency",
        _one_of("eventual", unavailable={"strong": "which is chosen record by record: kv.strong(name)"}),
        "eventual",
        "What the records of `kv.state` and of contexts promise. `eventual`: always writable where a quorum "
        "answers, concurrent writes become siblings that the reader sees. Linearizable records are chosen in "
        "the program, by `kv.strong(name)`, and always synced to disk, whatever `storage.fsync` says.",
    )  # fmt: skip
    reservation_ttl_s: float = _setting(
        "reservation_ttl", _positive_seconds, "10s",
        "How long a writer may take between reserving room for a block and publishing it. Longer: slow "
        "writers succeed; shorter: the room and the key of a writer that died are free again sooner.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """How bytes travel and how long to wait for them."""

    zero_copy_threshold_bytes: int = _setting(
        "zero_copy_threshold", _bytes, "4KB",
        "Blocks of this size and more go by reference: who reads on the pool's host gets a pinned view, who "
        "writes reserves room, writes into it and publishes it. Smaller ones are handed out as a copy and "
        "put in one message, which costs less than the second question; a view is cheaper than a copy at "
        "every size. Measured in [benchmarks](benchmarks.md). `0` makes every block a view.",
    )  # fmt: skip
    transports: tuple[str, ...] = _setting(
        "transports", _transports, [*TRANSPORTS],
        "What may reach into the pools' memory: `shm` (same host, reads without a copy), `cuda` (GPUs of "
        "one host), `verbs` (RDMA), `tcp`. Pools offer and clients use those of the list that work here, "
        "the cheapest by measurement; the order decides between equals. One that cannot be used is passed "
        "over with a reason (`kvcomm status`, `kvcomm doctor`). Without `shm` every read is a copy.",
    )  # fmt: skip
    listen_host: str = _setting(
        "listen_host", _host, "127.0.0.1",
        "Where the nodes' TCP ports (the data wire, and the transport `tcp`) listen, and what others are "
        "told to call. Loopback: nobody outside this host reaches them. Any other address lets agents of "
        "other hosts in, and **tokens and blocks then travel in clear**: use it on a network where nobody "
        "listens who should not.",
    )  # fmt: skip
    local_sockets: bool = _setting(
        "local_sockets", _truth, True,
        "Whether nodes also listen on a socket in the instance's directory, which callers on the same host "
        "prefer. `false`: everything goes over TCP. For tests that cut a network whose hosts share one file "
        "system: a socket there would cross every cut.",
    )  # fmt: skip
    drop_table: bool = _setting(
        "drop_table", _truth, False,
        "Whether the node takes orders to stop hearing some of its peers (`kvcomm chaos`), from whoever "
        "knows the cluster's own token. For tests: with `true` a partition can be made without root.",
    )  # fmt: skip
    rack: str = _setting(
        "rack", _text, "",
        "The rack that this process runs in, by the name that pools have in the ring. An agent uses the "
        "pools of its rack, and gets what they lack from the shards; blocks that many fetch are brought "
        "there ahead of need. Empty: it does not say, and uses all pools there are.",
    )  # fmt: skip
    rdma_device: str = _setting(
        "rdma_device", _text, "",
        "The RDMA device that `verbs` uses (as `kvcomm doctor` names it). Empty: the first one with an "
        "active port and a usable GID, which on a host with several need not be the one that reaches the "
        "others.",
    )  # fmt: skip
    request_timeout_s: float = _setting(
        "request_timeout", _positive_seconds, "2s",
        "How long one request to one node may take before the next copy or replica is tried. Shorter: a "
        "dead or paused node costs less; too short: a slow one is taken for dead.",
    )  # fmt: skip
    connect_timeout_s: float = _setting(
        "connect_timeout", _positive_seconds, "2s",
        "How long connecting to a node may take before it counts as unreachable.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How many nodes there are and how many must agree."""

    shards: int = _setting(
        "shards", _positive_count, 3,
        "Shard processes that `kvcomm up` starts.",
    )  # fmt: skip
    pools: int = _setting(
        "pools", _count, 1,
        "Pool processes that `kvcomm up` starts. With `0` agents use the shards only, over sockets.",
    )  # fmt: skip
    controllers: int = _setting(
        "controllers", _controllers, 1,
        "Controller processes, 1, 3 or 5. They issue the ring's maps and watch the nodes; a majority of them "
        "must be alive for anything to change, and none for reads and writes. Fixed for the life of a "
        "cluster.",
    )  # fmt: skip
    controller_addresses: tuple[str, ...] = _setting(
        "controller_addresses", _addresses, [],
        "Where the controllers listen and are found by nodes of other hosts: `tcp://host:port` of "
        "`controller-0` first, one for each. The same on every host. Empty: all nodes are on one host, and "
        "find them there. **Tokens travel in clear**, as with `network.listen_host`.",
    )  # fmt: skip
    replicas: int = _setting(
        "replicas", _positive_count, None,
        "Shards that keep each record. One more survives one more lost node and makes each write cost one "
        "more message. By default 3, or all shards where there are fewer. Fixed for the life of a cluster.",
        default_from=lambda section: min(3, section["shards"] or 3),
    )  # fmt: skip
    write_quorum: int = _setting(
        "write_quorum", _positive_count, None,
        "Replicas that must have a write on disk before it is acknowledged. Fewer: writes go on with more "
        "nodes away, but an acknowledged write has fewer copies. By default a majority of the replicas. "
        "Fixed for the life of a cluster.",
        default_from=lambda section: (section["replicas"] or 3) // 2 + 1,
    )  # fmt: skip
    read_quorum: int = _setting(
        "read_quorum", _positive_count, 1,
        "Replicas asked by a read of a record. With `read_quorum + write_quorum > replicas` a read always "
        "sees every acknowledged write. With less the first owner answers alone, for one message: it may be "
        "stale after it was away. Whoever stands in for it asks as many as it takes. Fixed for the life of a "
        "cluster.",
    )  # fmt: skip
    block_copies: int = _setting(
        "block_copies", _positive_count, 1,
        "Shards that keep each block. A lost block is only a miss, so one copy is correct; two survive a "
        "lost shard without recomputing, readers take the copy that answers faster, and they halve the "
        "capacity. A put is done with one copy; an owner that lags gets its copy in the background. Fixed "
        "for the life of a cluster.",
    )  # fmt: skip
    move_rate_bytes: int = _setting(
        "move_rate", _bytes, "64MB",
        "Bytes a second that a shard takes from the others to have what it should have, after the ring "
        "changed or it lost its memory. Only room for blocks that nobody uses is filled. Higher: moves are "
        "over sooner, but readers share the network with them. `0`: shards get no blocks from each other.",
    )  # fmt: skip
    move_blocks_limit_s: float = _setting(
        "move_blocks_limit", _seconds, "60s",
        "How long a move waits for blocks, at most: what has not come by then is a miss, and computed again. "
        "`0s`: only records are waited for.",
    )  # fmt: skip
    hot_block_rate: int = _setting(
        "hot_block_rate", _positive_count, 2,
        "Fetches a second, of all agents together, from which on a block is hot: the pools of all racks are "
        "told to have it. It stops to be at half of that. Lower: more blocks are brought to racks that may "
        "not need them.",
    )  # fmt: skip
    hot_record_rate: int = _setting(
        "hot_record_rate", _positive_count, 50,
        "Reads a second, of all agents together, from which on a record is hot: agents may then keep its "
        "answer for `cache.hot_record_age`. It stops to be at half of that. Lower: less load on shards, "
        "more answers that are a moment old.",
    )  # fmt: skip
    warm_rate_bytes: int = _setting(
        "warm_rate", _bytes, "32MB",
        "Bytes a second that each pool fetches of hot blocks, at most; such copies take at most an eighth of "
        "it, and the place of blocks that were not read lately. `0`: pools are told of none.",
    )  # fmt: skip
    repair_interval_s: float = _setting(
        "repair_interval", _positive_seconds, "60s",
        "How often each shard compares its records with those of each other shard that keeps them, without "
        "anybody reading; also after that one was away. Shorter: differences that nobody noticed live less "
        "long. One message where there are none.",
    )  # fmt: skip
    hint_bytes: int = _setting(
        "hint_bytes", _bytes, "64MB",
        "Memory of each shard for hints: which record which other shard missed, about 300 bytes each. At the "
        "bound new hints are refused and counted; no record is lost by that, comparing finds it later.",
    )  # fmt: skip
    hint_age_s: float = _setting(
        "hint_age", _positive_seconds, "3h",
        "How long a hint is kept for a shard that is away. After that only comparing tells it what it "
        "missed. Must be below `tombstone_age`.",
    )  # fmt: skip
    tombstone_age_s: float = _setting(
        "tombstone_age", _positive_seconds, "24h",
        "How long a deleted record is remembered at least; longer while a shard that keeps it is away, so "
        "that no deleted record returns. Longer: more room for what is deleted. Keep it far above the time "
        "that a message may be under way.",
    )  # fmt: skip
    heartbeat_s: float = _setting(
        "heartbeat", _positive_seconds, "2s",
        "How often each node tells the controllers that it is there; also at once when something changes. "
        "Shorter: a dead node is noticed sooner, a busy one is taken for dead sooner.",
    )  # fmt: skip
    lease_s: float = _setting(
        "lease", _lease_seconds, "6s",
        "How long a controller leads without hearing from a majority of the others. When the leader dies "
        "another one leads after this time and a little more; until then nothing changes, and reads and "
        "writes go on.",
    )  # fmt: skip
    balance: Literal["none", "threshold", "greedy"] = _setting(
        "balance", _one_of("none", "threshold", "greedy"), "none",
        "The load policy by which the leading controller moves keys between shards by itself. `threshold`: "
        "when a shard has had far more than its share for a while. `greedy`: whenever a move pays. `none`: "
        "only when an operator says so (`kvcomm rebalance`).",
    )  # fmt: skip
    replace_after_s: float = _setting(
        "replace_after", _seconds, "10m",
        "How long a shard may be dead before its part of the data is given new owners, copied from the "
        "replicas that are left. Shorter: fewer copies for a shorter time, but a host that only restarts "
        "has its data moved. `0s`: never.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Where records are kept and when they are on disk."""

    directory: str = _setting(
        "directory", _text, "",
        "Where shards keep their records, and the instance's secret with them: record names are made with "
        "it. Empty: inside the instance's own directory, which is removed with "
        "the instance and may not survive a reboot.",
    )  # fmt: skip
    fsync: Literal["always", "interval", "never"] = _setting(
        "fsync", _one_of("always", "interval", "never"), "always",
        "When a record write is forced to disk. `always`: before it is acknowledged, nothing acknowledged "
        "is lost in a power cut. `interval`: acknowledged first, forced every `fsync_interval`. `never`: "
        "left to the operating system. With these two a crash of the process loses nothing, but a power cut "
        "costs the shard its whole database: it is set aside and the shard starts empty, so only what other "
        "hosts' replicas have is left.",
    )  # fmt: skip
    fsync_interval_s: float = _setting(
        "fsync_interval", _positive_seconds, "50ms",
        "How often `fsync: interval` forces writes to disk. Not used otherwise.",
    )  # fmt: skip
    scrub_interval_s: float = _setting(
        "scrub_interval", _positive_seconds, "24h",
        "Within this time each shard reads and verifies every record it keeps, so that one that decayed on "
        "the disk is fetched from the other shards before those lose it too. Shorter: found sooner, for more "
        "reading.",
    )  # fmt: skip
    scrub_rate_bytes: int = _setting(
        "scrub_rate", _positive_bytes, "8MB",
        "Record bytes that this reads a second, at most. Where it is too little for `scrub_interval`, a pass "
        "takes longer.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordsConfig:
    """What the values of records keep to."""

    validators: tuple[Rule, ...] = _setting(
        "validators", _validators, [],
        "Rules that a written value must keep, by name; see [records](records.md). A write that breaks one "
        "is refused (`Rejected`) before anything is written. Checked by the shard that coordinates the "
        "write, against what it has seen: two sides of a split may together break what each has kept.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Where a shard keeps blocks beside its memory."""

    disk_path: str = _setting(
        "disk_path", _text, "",
        "Directory for a disk tier of the shards' blocks, one file a block; each shard takes a part of its "
        "own. What memory evicts is then still had, at the disk's speed, also after a restart; of the whole "
        "cluster only with `storage.directory` set, which keeps the secret that names are made with. Put it "
        "on a local disk that records are not synced to. Empty: no disk tier, an evicted block is a miss.",
    )  # fmt: skip
    disk_bytes: int = _setting(
        "disk_bytes", _bytes, "10GB",
        "What each shard's files may take on the disk. At the bound the least useful blocks are evicted for "
        "good. Not used without `disk_path`.",
    )  # fmt: skip
    disk_fsync: Literal["never", "always"] = _setting(
        "disk_fsync", _one_of("never", "always"), "never",
        "When a block's file is forced to disk. `never`: left to the operating system; a power cut may "
        "damage the newest files, which is found out when they are read: each is a miss. `always`: before "
        "it counts as written; fewer blocks keep pace with the disk. Nobody waits for either.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """For whom this process acts, and how it proves it."""

    tenant: str = _setting(
        "tenant", _tenant, "default",
        "The tenant that an agent on the instance's own host acts for. Tenants never see each other's blocks "
        "or records.",
    )  # fmt: skip
    token_file: str = _setting(
        "token_file", _text, "",
        "File with the token that proves the tenant, for agents that cannot read the instance's secret "
        "(another host, another user). Empty: the token is made from the instance's secret.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set.  Made by :func:`parse_config` only, so that its parts agree.

    ``cache``: how much is kept; ``network``: how it travels; ``cluster``: who takes part; ``storage``: where
    records lie; ``records``: what may be written to them; ``shard``: the disk tier of blocks;
    ``security``: who we are.
    """

    cache: CacheConfig = field(metadata={"section": CacheConfig})
    network: NetworkConfig = field(metadata={"section": NetworkConfig})
    cluster: ClusterConfig = field(metadata={"section": ClusterConfig})
    storage: StorageConfig = field(metadata={"section": StorageConfig})
    records: RecordsConfig = field(metadata={"section": RecordsConfig})
    shard: ShardConfig = field(metadata={"section": ShardConfig})
    security: SecurityConfig = field(metadata={"section": SecurityConfig})


# -- reading -------------------------------------------------------------------------------------------------


def _document(text: str) -> dict[Any, Any]:
    import yaml  # 15 ms that a client without a configuration file does not pay

    if not text.strip():
        return {}
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), "")
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration must be sections with keys, got {type(document).__name__}")
    return document


def _refuse_repeated_keys(node: Any, path: str) -> None:
    """YAML lets a later key silently replace an earlier one; only the node tree still shows both."""
    pairs = node.value if getattr(node, "id", "") == "mapping" else []
    seen: set[str] = set()
    for key, value in pairs:
        if key.id != "scalar":
            raise ConfigError(f"{path or 'the top level'} has a key that is not plain text")
        name = f"{path}.{key.value}" if path else key.value
        if name in seen:
            raise ConfigError(f"{name} is set twice (second time on line {key.start_mark.line + 1})")
        seen.add(name)
        if path.count(".") < 1:  # the schema has two levels; deeper nesting is refused by type
            _refuse_repeated_keys(value, name)


def _section(section: type[Any], name: str, given: Any, ram_bytes: int, problems: list[str]) -> Any:
    if given is None:  # absent, or a heading with everything under it commented out
        given = {}
    if not isinstance(given, dict):
        problems.append(f"{name} must be a section with keys, got {type(given).__name__}")
        return None
    declared = _declared(section)
    _check_keys(given, [setting.key for setting in declared.values()], name, problems)
    values: dict[str, Any] = {}
    for attribute, setting in declared.items():
        if setting.key in given or setting.default_from is None:
            written = given.get(setting.key, setting.default)
        else:
            written = setting.default_from(values)
        whole_bytes = values[setting.share_of] if setting.share_of else ram_bytes
        values[attribute] = None
        if whole_bytes is None:
            continue  # a share of a size that is itself wrong: one mistake, one message
        try:
            values[attribute] = setting.parse(written, whole_bytes)
        except ValueError as error:
            problems.append(f"{name}.{setting.key} {error}")
    return section(**values)


def _declared(section: type[Any]) -> dict[str, Setting]:
    return {each.name: each.metadata["setting"] for each in fields(section)}


def _sections() -> dict[str, type[Any]]:
    return {each.name: each.metadata["section"] for each in fields(Config)}


def _check_keys(given: Mapping[Any, Any], known: list[str], path: str, problems: list[str]) -> None:
    for key in given:
        full = f"{path}.{key}" if path else str(key)
        if full in _PLANNED:
            problems.append(f"{full} is known but not in this version: {_PLANNED[full]}; leave it out")
        elif key not in known:
            problems.append(f"unknown key {full}{_nearest(str(key), known, path)}")


def _nearest(key: str, known: list[str], path: str) -> str:
    """The nearest key of the same section; else a key of that very name in another one."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    candidates = [f"{path}.{each}" if path else each for each in near]
    candidates += [full for full, _ in settings() if full.rpartition(".")[2] == key]
    return f", did you mean {candidates[0]}?" if candidates else f"; known here: {', '.join(known)}"


def _contradictions(config: Config) -> Iterator[str]:
    cluster, cache = config.cluster, config.cache
    for key, count in (("replicas", cluster.replicas), ("block_copies", cluster.block_copies)):
        if count > cluster.shards:
            yield f"cluster.{key} is {count}, but cluster.shards is {cluster.shards}: nobody to keep the rest"
    for key, count in (("write_quorum", cluster.write_quorum), ("read_quorum", cluster.read_quorum)):
        if count > cluster.replicas:
            yield f"cluster.{key} is {count}, but cluster.replicas is {cluster.replicas}: never met"
    if cluster.controller_addresses and len(cluster.controller_addresses) != cluster.controllers:
        yield (
            f"cluster.controller_addresses names {len(cluster.controller_addresses)}, but "
            f"cluster.controllers is {cluster.controllers}"
        )
    if cluster.hint_age_s >= cluster.tombstone_age_s:
        yield (
            f"cluster.hint_age is {cluster.hint_age_s:g} s, but cluster.tombstone_age is "
            f"{cluster.tombstone_age_s:g} s: hints must be given up first"
        )
    if cache.l2_device is not None and "cuda" not in config.network.transports:
        yield (
            f"cache.l2_device is cuda:{cache.l2_device}, but network.transports has no cuda, which alone "
            "reaches it"
        )
    if cache.l2_pin_budget_bytes > cache.l2_size_bytes:
        yield (
            f"cache.l2_pin_budget is {cache.l2_pin_budget_bytes} bytes, "
            f"but cache.l2_size is {cache.l2_size_bytes}"
        )


# -- documentation -------------------------------------------------------------------------------------------


def settings() -> list[tuple[str, Setting]]:
    """Every setting with its full key."""
    return [
        (f"{name}.{setting.key}", setting)
        for name, section in _sections().items()
        for setting in _declared(section).values()
    ]


def reference() -> str:
    """``docs/configuration.md``."""
    lines = [*_PREAMBLE]
    for name, section in _sections().items():
        lines += ["", f"## {name}", "", str(section.__doc__), ""]
        lines += ["| key | default | consequence |", "|---|---|---|"]
        for setting in _declared(section).values():
            lines.append(f"| `{setting.key}` | {_shown(setting.default)} | {setting.means} |")
    lines += ["", "## Known, but not in this version", ""]
    lines += [f"* `{key}`: {why}." for key, why in _PLANNED.items()]
    return "\n".join(lines) + "\n"


_PREAMBLE = (
    "# Configuration",
    "",
    "<!-- Generated from kvcomm/config.py by scripts/gen-docs; do not edit. -->",
    "",
    "KVCOMM reads one YAML file, once, at start: the path given on the command line or to `kvcomm.connect`,",
    "else `$KVCOMM_CONFIG`, else `./kvcomm.yaml`, else every default applies. `kvcomm.example.yaml` shows",
    "all keys.",
    "",
    'Sizes are whole bytes, `"1GB"` (10^9) or `"1GiB"` (2^30). The sizes of `cache` may also be a share of',
    'the memory that this process may use, such as `"15%"` (a container counts by its limit). Durations name',
    'their unit: `"50ms"`, `"5s"`, `"2m"`. An unknown key is an error that names the nearest known one.',
)


def _shown(default: Any) -> str:
    if default is None:
        return "see text"
    if isinstance(default, list):
        return f"`[{', '.join(default)}]`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"
