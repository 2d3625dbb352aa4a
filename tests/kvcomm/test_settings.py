"""Where the configuration comes from."""

import os
from pathlib import Path

import pytest

from kvcomm import settings
from kvcomm.errors import ConfigError
from kvcomm.settings import load_config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCOMM_CONFIG", raising=False)
    return tmp_path


def write(path: Path, shards: int) -> Path:
    path.write_text(f"cluster: {{shards: {shards}}}\n")
    return path


def test_without_a_file_the_defaults_apply() -> None:
    assert load_config().cluster.shards == 3


def test_the_order_is_argument_then_environment_then_here(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(elsewhere / "kvcomm.yaml", 5)
    assert load_config().cluster.shards == 5
    monkeypatch.setenv("KVCOMM_CONFIG", str(write(elsewhere / "named.yaml", 7)))
    assert load_config().cluster.shards == 7
    assert load_config(write(elsewhere / "given.yaml", 9)).cluster.shards == 9


def test_a_named_file_must_be_there(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config("absent.yaml")
    monkeypatch.setenv("KVCOMM_CONFIG", "gone.yaml")
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file"):
        load_config()
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(elsewhere)


def test_each_problem_names_the_file(elsewhere: Path) -> None:
    (elsewhere / "bad.yaml").write_text("cluster: {shard: 1}\ncache: {l1_size: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_config("bad.yaml")
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == ["bad.yaml", "bad.yaml"]


def test_what_is_no_text_is_refused(elsewhere: Path) -> None:
    (elsewhere / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config("binary.yaml")
    (elsewhere / "huge.yaml").write_bytes(b"#" * (settings.CONFIG_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="that is no configuration"):
        load_config("huge.yaml")


def test_a_control_group_limits_the_memory(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    unlimited, limited = elsewhere / "max", elsewhere / "limit"
    unlimited.write_text("max\n")
    limited.write_text("100000000\n")
    monkeypatch.setattr(settings, "_CGROUP_LIMITS", (unlimited, elsewhere / "absent"))
    assert settings.ram_bytes() == machine_bytes
    monkeypatch.setattr(settings, "_CGROUP_LIMITS", (unlimited, limited))
    assert settings.ram_bytes() == 100_000_000
    assert load_config().cache.l2_size_bytes == 25_000_000
