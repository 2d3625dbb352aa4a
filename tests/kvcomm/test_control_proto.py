"""The committed control_pb2 modules are what the compiler makes of control.proto."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py")

STAMPS = (
    # What differs between generators without a change of meaning: their versions, and two habits of style.
    (re.compile(r"# Protobuf Python Version: [\d.]+"), "# Protobuf Python Version"),
    (re.compile(r"(Domain\.PUBLIC,\n)    \d+,\n    \d+,\n    \d+,"), r"\1    version,"),
    (re.compile(r"GRPC_GENERATED_VERSION = '[\d.]+'"), "GRPC_GENERATED_VERSION"),
    (re.compile(r"^(class \w+)\(object\):", re.MULTILINE), r"\1:"),
    (re.compile(r": (?:_Optional\[bool\]|bool) = \.\.\."), ": bool = ..."),
)


def unstamped(text: str) -> str:
    for pattern, replacement in STAMPS:
        text = pattern.sub(replacement, text)
    return text


@pytest.mark.slow
@pytest.mark.processes
def test_regenerating_gives_the_committed_text(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts/gen-proto"), str(tmp_path)], check=True, timeout=60)
    exact = version("grpcio-tools") == generator()
    for name in GENERATED:
        made = (tmp_path / "kvcomm/wire" / name).read_text()
        committed = (ROOT / "kvcomm/wire" / name).read_text()
        if exact:
            assert made == committed
        assert unstamped(made) == unstamped(committed), f"{name} is stale: run scripts/gen-proto"


def test_a_changed_message_would_be_noticed() -> None:
    committed = (ROOT / "kvcomm/wire/control_pb2.py").read_text()
    assert unstamped(committed.replace("uptime_seconds", "uptime_hours")) != unstamped(committed)


def test_the_generator_is_the_oldest_that_the_package_admits() -> None:
    committed = (ROOT / "kvcomm/wire/control_pb2_grpc.py").read_text()
    assert f"GRPC_GENERATED_VERSION = '{generator()}'" in committed


def generator() -> str:
    found = re.search(r'^GENERATOR = "([\d.]+)"$', (ROOT / "scripts/gen-proto").read_text(), re.MULTILINE)
    assert found
    return found[1]
