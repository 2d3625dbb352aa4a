"""``RemoteKeys``: no word of absence without an authoritative feed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from l1.remote import Feed, RemoteKeys

KEYS = [bytes([letter]) * 32 for letter in b"abcdefghijklmnop"]


def test_off_until_synced_and_off_again_when_lost():
    remote = RemoteKeys(16)
    assert remote.maybe(KEYS[0])
    feed = remote.opened()
    remote.heard(KEYS[:2])
    assert remote.maybe(KEYS[5]), "the inventory may not have come as far as this key"
    assert remote.synced(feed)
    assert remote.authoritative
    assert remote.maybe(KEYS[0])
    assert not remote.maybe(KEYS[5])
    assert remote.skipped == 1
    remote.lost()
    assert remote.maybe(KEYS[5])
    assert not remote.authoritative


def test_the_end_of_a_former_feed_means_nothing():
    remote = RemoteKeys(16)
    former = remote.opened()
    feed = remote.opened()
    assert not remote.synced(former)
    assert remote.maybe(KEYS[0])
    assert remote.synced(feed)
    assert not remote.maybe(KEYS[0])


def test_a_lost_feed_cannot_be_synced():
    remote = RemoteKeys(16)
    feed = remote.opened()
    remote.lost()
    assert not remote.synced(feed)
    assert remote.maybe(KEYS[0])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(KEYS)),
        st.tuples(st.sampled_from(["open", "list", "sync", "lose"]), st.none()),
    ),
    max_size=40,
)


@given(steps)
def test_a_visible_key_is_never_called_absent(script):
    """The oracle is the set of visible keys.  While open, the feed hears of a key before others see it."""
    remote, visible, feed, listed = RemoteKeys(4), set[bytes](), Feed(0), False
    for name, key in script:
        if name == "publish" and key is not None:
            remote.heard([key])
            visible.add(key)
        elif name == "open":
            feed, listed = remote.opened(), False
        elif name == "list":
            remote.heard(sorted(visible))
            listed = True
        elif name == "sync" and listed:
            remote.synced(feed)
        elif name == "lose":
            remote.lost()
            listed = False
        assert all(remote.maybe(each) for each in visible)
