import pytest

from kvcomm.errors import ConfigError
from kvcomm.wire.address import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:0", Address(host="127.0.0.1")),
        ("tcp://shard-1.rack:65535", Address(host="shard-1.rack", port=65535)),
        ("tcp://[::1]:80", Address(host="::1", port=80)),
        ("unix:///run/kv.sock", Address(path="/run/kv.sock")),
    ],
)
def test_parse_and_str_are_inverses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:80", "tcp://:80", "tcp://h", "tcp://h:65536", "tcp://h:-1", "unix://x"]
)
def test_what_is_not_an_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address; write tcp://host:port or unix:///path"):
        parse_address(text)


def test_a_path_that_no_unix_socket_can_have_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="KVCOMM_RUNTIME_DIR"):
        parse_address("unix:///" + "x" * 107)
    parse_address("unix:///" + "x" * 106)
