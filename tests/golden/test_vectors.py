"""The recorded bytes are what the code computes today, on every machine and under every seed."""

from __future__ import annotations

import pytest

from kvcomm.block import BlockHeader
from kvcomm.manifest import Manifest
from kvcomm.streams import rollout_codec
from kvcomm.streams.context import StreamContext
from tests.golden import vectors
from tests.namespaces import namespace

COMPUTED = vectors.computed()


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, values in COMPUTED.items() for case in values]
)
def test_the_format_is_the_recorded_one(name: str, case: str):
    assert COMPUTED[name][case] == vectors.recorded(name)[case]


@pytest.mark.parametrize("name", COMPUTED)
def test_nothing_recorded_is_left_untested(name: str):
    assert vectors.recorded(name).keys() == COMPUTED[name].keys()


@pytest.mark.parametrize("name", ["exact", "approximate"])
def test_a_recorded_header_is_still_read(name: str):
    header = BlockHeader.unpack(bytes.fromhex(vectors.recorded("headers")[name]))
    assert header == vectors.header(name == "approximate")
    assert header.approximate == (name == "approximate")


def test_a_recorded_manifest_is_still_read():
    assert Manifest.decode(bytes.fromhex(vectors.recorded("manifests")["jump"])) == vectors.manifest()


def test_a_recorded_rollout_is_still_read():
    recorded = vectors.recorded("rollouts")
    assert rollout_codec.decode(bytes.fromhex(recorded["binary"])) == vectors.rollout()
    assert rollout_codec.from_json(recorded["json"].encode()) == vectors.rollout()


def test_a_recorded_stream_is_still_read_and_follows_from_its_log():
    context = StreamContext.decode(bytes.fromhex(vectors.recorded("streams")["binary"]))
    assert context == vectors.stream()
    chain = context.verify(namespace(tenant=vectors.TENANT))
    assert context.archived and context.pending == 5 and chain.tail is not None
