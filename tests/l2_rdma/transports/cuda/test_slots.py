"""An owner whose slots are in GPU memory keeps its promises, and keeps file and GPU in step."""

import pytest

from kvcomm.block import Incarnation
from kvcomm.blockstore import ANY_TENANT
from kvcomm.errors import ConfigError, Refused
from kvcomm.wire.messages import Want
from l2_rdma.layout import RESERVED_FLAG
from l2_rdma.region import Region
from l2_rdma.transports.cuda.region import CudaRegion
from tests.l2_rdma.regions import TENANT, header_of, key_of, layout_of, payload_of
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu

LONG = 3 * 1024 + 256


def test_a_published_header_is_in_the_file_and_its_payload_is_not(make_pool):
    pool = make_pool()
    assert pool.put(1) == "published"

    offset = pool.offset_of(1)
    file = bytes(pool.region.file.memory[offset : offset + 1024])
    assert file[:248] == header_of(1).pack()[:248]
    assert file[256:] == bytes(768)


def test_the_generation_word_is_the_same_in_both_places(make_pool):
    pool = make_pool()
    grant = pool.owner.reserve([Want(key_of(1), 1024)], 1, TENANT, 0.0)[0]
    word = (grant.offset + 248) // 8
    seen = [(pool.region.file.words[word], pool.generation_on_gpu(grant.offset))]
    pool.owner.abort([grant.token], 1)
    seen.append((pool.region.file.words[word], pool.generation_on_gpu(grant.offset)))
    pool.put(2)
    offset = pool.offset_of(2)
    seen.append((pool.region.file.words[(offset + 248) // 8], pool.generation_on_gpu(offset)))

    assert seen[0] == (grant.generation | RESERVED_FLAG,) * 2
    assert seen[1] == (0, 0)
    assert seen[2][0] == seen[2][1] > grant.generation


@pytest.mark.parametrize("payload_bytes", [0, 8, 240, 248, LONG])
def test_what_comes_over_a_socket_lands_on_the_gpu_and_is_verified_there(make_pool, payload_bytes):
    pool = make_pool()
    payload = payload_of(3, payload_bytes)
    for damaged in (True, False):
        grant = pool.owner.reserve([Want(key_of(3), 256 + payload_bytes)], 1, TENANT, 0.0)[0]
        landing = pool.owner.extent(grant.token)
        landing[:256] = header_of(3, payload).pack()
        landing[256:] = payload
        if damaged and payload_bytes:
            landing[-1] ^= 1
        expected = "corrupt" if damaged and payload_bytes else "published"
        assert pool.owner.publish([grant.token], 1, 0.0, verify=True) == [expected]
        if expected == "published":
            break
        pool.owner.tick(1.0)

    lease = pool.owner.lease(key_of(3), ANY_TENANT)
    assert bytes(lease.copy[256:]) == payload
    assert bytes(lease.copy[:248]) == header_of(3, payload).pack()[:248]
    lease.release()
    pool.owner.check()


def test_a_header_of_another_key_is_not_published(make_pool):
    pool = make_pool()

    assert pool.put(4, key=key_of(5)) == "corrupt"
    assert pool.owner.present([key_of(4), key_of(5)], TENANT) == [False, False]


def test_a_damaged_payload_is_quarantined_when_a_reader_reports_it(make_pool):
    pool = make_pool()
    pool.put(1)
    pool.put(2)
    pool.damage(1)

    pool.owner.quarantine([key_of(1), key_of(2)], TENANT)

    assert pool.owner.present([key_of(1), key_of(2)], TENANT) == [False, True]
    pool.owner.check()


def test_a_scribbled_header_in_the_file_is_written_again_by_an_inspection(make_pool):
    pool = make_pool()
    pool.put(1)
    offset = pool.offset_of(1)
    pool.region.file.memory[offset + 20] ^= 1
    assert pool.reader.view([key_of(1)]) == [None]

    pool.owner.tick(1.0)  # the reader has left a suspect word

    assert pool.reader.view([key_of(1)]) != [None]


def test_slots_are_reused_and_never_shown_with_an_old_generation(make_pool):
    pool = make_pool(slab_count=1)
    generations = []
    for number in range(12):
        assert pool.put(number) == "published"
        generations.append(pool.generation_on_gpu(pool.offset_of(number)))
        pool.owner.tick(float(number))
        pool.owner.check()

    assert generations == sorted(set(generations))
    assert pool.owner.usage().evicted_count >= 8


def test_a_full_directory_is_a_full_pool(make_pool, monkeypatch):
    pool = make_pool()
    monkeypatch.setattr(pool.region.file, "back_header", lambda offset: False)

    assert pool.put(1) == "full"
    pool.owner.check()


def test_a_region_on_a_gpu_is_no_region_of_shared_memory_and_the_other_way_round(make_pool, tmp_path):
    pool = make_pool()
    with pytest.raises(Refused, match="GPU's memory"):
        Region.attach(pool.region.file.path, TENANT)
    plain = Region.create(
        tmp_path, instance="t", node="n", tenant=TENANT, incarnation=Incarnation(3), layout=layout_of(1)
    )
    try:
        with pytest.raises(Refused, match="in the file itself"):
            CudaRegion.map(str(plain.path), TENANT, pool.gpu, pool.region.handle())
    finally:
        plain.close()


def test_a_gpu_without_room_leaves_nothing_behind(tmp_path):
    gpu = HostGpu(tmp_path, memory_bytes=1000)
    with pytest.raises(ConfigError):
        CudaRegion.create(
            tmp_path,
            gpu,
            instance="t",
            node="n",
            tenant=TENANT,
            incarnation=Incarnation(3),
            layout=layout_of(1),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_room_gives_the_gpu_memory_back(tmp_path):
    gpu = HostGpu(tmp_path)
    with pytest.raises(ConfigError):
        CudaRegion.create(
            tmp_path / "none",
            gpu,
            instance="t",
            node="n",
            tenant=TENANT,
            incarnation=Incarnation(3),
            layout=layout_of(1),
        )
    assert list(tmp_path.iterdir()) == []
