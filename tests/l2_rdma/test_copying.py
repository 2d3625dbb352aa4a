import threading
from array import array

import pytest

from l2_rdma.copying import RELEASE_GIL_BYTES, copy_bytes


@pytest.mark.parametrize("size", [0, 1, RELEASE_GIL_BYTES - 8, RELEASE_GIL_BYTES, RELEASE_GIL_BYTES + 8])
def test_every_byte_is_copied_and_none_beside(size):
    source = bytes(index * 7 % 251 for index in range(size))
    destination = bytearray(b"\xee" * (size + 16))

    copy_bytes(memoryview(destination)[8 : 8 + size], memoryview(source))

    assert destination == b"\xee" * 8 + source + b"\xee" * 8


def test_other_formats_are_bytes():
    source = array("d", range(RELEASE_GIL_BYTES // 4))
    destination = bytearray(8 * len(source))

    copy_bytes(memoryview(destination), memoryview(source))

    assert destination == source.tobytes()


def test_lengths_must_be_equal():
    with pytest.raises(ValueError, match="cannot copy"):
        copy_bytes(memoryview(bytearray(4)), memoryview(b"12345"))


def test_read_only_memory_is_not_written_to():
    frozen = memoryview(bytes(RELEASE_GIL_BYTES))

    with pytest.raises(BufferError):
        copy_bytes(frozen, memoryview(bytearray(RELEASE_GIL_BYTES)))
    assert frozen[0] == 0


@pytest.mark.slow
def test_other_threads_run_during_a_large_copy():
    source = memoryview(bytearray(256 << 20))
    destination = memoryview(bytearray(256 << 20))
    done, counted = threading.Event(), []

    def count():
        steps = 0
        while not done.is_set():
            steps += 1
        counted.append(steps)

    counter = threading.Thread(target=count)
    counter.start()
    copy_bytes(destination, source)
    done.set()
    counter.join()

    assert counted[0] > 1000
