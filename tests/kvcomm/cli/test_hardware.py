"""What is said of devices, from a kernel's files laid out in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcomm.cli.finding import Finding
from kvcomm.cli.hardware import Host, gpu_direct, hardware_findings

POOL_BYTES = 1 << 30
GPU = "0000:3b:00.0"
LIMITED = "Name:\tpython\nCapEff:\t0000000000000000\n"
PRIVILEGED = "Name:\tpython\nCapEff:\t0000000000004000\n"


class Machine:
    """A root directory that fills itself."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> None:
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text + "\n")

    def pci(self, address: str, below: str, link: str, numa: int = 0) -> None:
        """A PCI device at ``/sys/devices/<below>/<address>``, and a link to it."""
        at = self.root / "sys/devices" / below / address
        at.mkdir(parents=True)
        (at / "numa_node").write_text(f"{numa}\n")
        (self.root / link).parent.mkdir(parents=True, exist_ok=True)
        (self.root / link).symlink_to(at)

    def nic(self, name: str, below: str, address: str, *, state: str = "4: ACTIVE", mtu: int = 9000) -> None:
        base = f"sys/class/infiniband/{name}"
        port = f"{base}/ports/1"
        self.write(f"{port}/state", state)
        self.write(f"{port}/link_layer", "Ethernet")
        self.write(f"{port}/rate", "100 Gb/sec (4X EDR)")
        self.write(f"{base}/fw_ver", "22.36.1010")
        gids = ["fe80:0000:0000:0000:0000:0000:0000:0001", "0000:0000:0000:0000:0000:ffff:0a00:0001"]
        for index, gid in enumerate([*gids, "0000:0000:0000:0000:0000:0000:0000:0000"]):
            self.write(f"{port}/gids/{index}", gid)
        for index, kind in enumerate(("IB/RoCE v1", "RoCE v2")):
            self.write(f"{port}/gid_attrs/types/{index}", kind)
            self.write(f"{port}/gid_attrs/ndevs/{index}", f"eth-{name}")
        self.write(f"sys/class/net/eth-{name}/mtu", str(mtu))
        self.write(f"dev/infiniband/uverbs{name[-1]}")
        self.pci(address, below, f"{base}/device")
        driver = self.root / "sys/bus/pci/drivers/mlx5_core"
        driver.mkdir(parents=True, exist_ok=True)
        (self.root / "sys/devices" / below / address / "driver").symlink_to(driver)
        self.write("sys/module/mlx5_core/version", "5.8-1")

    def gpu(self, below: str, numa: int = 0, *, modules: str = "") -> None:
        self.write(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX {modules}x86_64 Kernel Module  550.54.14",
        )
        self.write(f"proc/driver/nvidia/gpus/{GPU}/information", "Model: \t\t NVIDIA H200\nIRQ: 1")
        self.pci(GPU, below, f"sys/bus/pci/devices/{GPU}", numa)

    def findings(
        self, memlock_bytes: int | None = None, kernel: str = "6.1.0-18-amd64", status: str = LIMITED
    ) -> dict[str, list[Finding]]:
        self.write("proc/self/status", status)
        found: dict[str, list[Finding]] = {}
        for each in hardware_findings(Host(self.root, memlock_bytes, kernel), POOL_BYTES):
            found.setdefault(each.subject, []).append(each)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_such_hardware_is_silent(machine: Machine) -> None:
    assert machine.findings(memlock_bytes=8 << 20) == {}


def test_this_machine_can_be_looked_at() -> None:
    assert isinstance(list(hardware_findings(Host.here(), POOL_BYTES)), list)


def test_a_usable_device_is_described(machine: Machine) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0")
    found = machine.findings()
    (port,) = found["rdma mlx5_0/1"]
    assert port.verdict == "ok"
    assert port.text == (
        "ACTIVE, Ethernet, 100 Gb/sec (4X EDR), mlx5_core 5.8-1, fw 22.36.1010; "
        "GID 0 fe80::1 (IB/RoCE v1, eth-mlx5_0); "
        "GID 1 ::ffff:10.0.0.1 (RoCE v2, eth-mlx5_0)"
    )
    assert found["rdma access"][0].verdict == "ok"


def test_a_port_that_is_down_says_what_to_check(machine: Machine) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0", state="1: DOWN")
    (port,) = machine.findings()["rdma mlx5_0/1"]
    assert port.verdict == "note"
    assert "DOWN" in port.text
    assert "cable" in port.text


def test_a_port_without_a_roce_v2_gid_is_told(machine: Machine) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0")
    machine.write("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1", "IB/RoCE v1")
    (port,) = machine.findings()["rdma mlx5_0/1"]
    assert port.verdict == "note"
    assert "IP address" in port.text


def test_a_small_mtu_is_told_with_the_command(machine: Machine) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0", mtu=1500)
    usable, mtu = machine.findings()["rdma mlx5_0/1"]
    assert (usable.verdict, mtu.verdict) == ("ok", "note")
    assert "ip link set eth-mlx5_0 mtu 9000" in mtu.text


def test_a_software_device_is_called_that(machine: Machine) -> None:
    machine.nic("rxe0", "pci0000:00/0000:00:01.0", "0000:01:00.0")
    machine.write("sys/class/infiniband/rxe0/parent", "veth1")
    assert "software (soft-RoCE) on veth1" in machine.findings()["rdma rxe0/1"][0].text


def test_devices_that_a_container_was_not_given(machine: Machine) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0")
    (machine.root / "dev/infiniband/uverbs0").unlink()
    (access,) = machine.findings()["rdma access"]
    assert access.verdict == "note"
    assert "--device=/dev/infiniband" in access.text


def test_devices_without_the_right_to_open_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (access,) = machine.findings()["rdma access"]
    assert access.verdict == "note"
    assert "/dev/infiniband/uverbs0" in access.text


@pytest.mark.parametrize(
    ("memlock_bytes", "status", "verdict"),
    [
        (8 << 20, LIMITED, "note"),
        (8 << 20, PRIVILEGED, "ok"),
        (POOL_BYTES, LIMITED, "ok"),
        (None, LIMITED, "ok"),
    ],
)
def test_the_locked_memory_limit_is_held_against_the_pool(
    machine: Machine, memlock_bytes: int | None, status: str, verdict: str
) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0")
    (limit,) = machine.findings(memlock_bytes, status=status)["locked memory"]
    assert limit.verdict == verdict
    assert ("LimitMEMLOCK=infinity" in limit.text) == (verdict == "note")


@pytest.mark.parametrize(
    ("modules", "peer", "kernel", "verdict", "says"),
    [
        ("", "nvidia_peermem", "5.4.0", "ok", "module nvidia_peermem"),
        ("Open Kernel Module ", "", "6.1.0", "ok", "dma-buf"),
        ("Open Kernel Module ", "", "5.4.0", "note", "modprobe nvidia-peermem"),
        ("", "", "6.1.0", "note", "modprobe nvidia-peermem"),
        ("", "", "strange", "note", "modprobe nvidia-peermem"),
    ],
)
def test_what_lets_a_nic_at_gpu_memory(
    machine: Machine, modules: str, peer: str, kernel: str, verdict: str, says: str
) -> None:
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0", "0000:3c:00.0")
    machine.gpu("pci0000:3a/0000:3a:00.0", modules=modules)
    if peer:
        machine.write(f"sys/module/{peer}/version", "550.54.14")
    (direct,) = machine.findings(kernel=kernel)["gpudirect"]
    assert direct.verdict == verdict
    assert says in direct.text
    assert gpu_direct(Host(machine.root, None, kernel)) == (verdict == "ok", direct.text)


def test_nothing_can_be_reached_where_there_is_no_gpu(machine: Machine) -> None:
    assert gpu_direct(Host(machine.root, None, "6.1.0")) == (False, "no GPU here")


def test_gpus_are_named_and_find_their_nearest_nic(machine: Machine) -> None:
    machine.gpu("pci0000:3a/0000:3a:00.0/0000:3a:01.0", numa=0)
    machine.nic("mlx5_0", "pci0000:3a/0000:3a:00.0/0000:3a:02.0", "0000:3c:00.0")  # of one switch
    machine.nic("mlx5_1", "pci0000:3a/0000:3a:03.0", "0000:3d:00.0")  # another root port
    machine.nic("mlx5_2", "pci0000:5d/0000:5d:00.0", "0000:5e:00.0")  # another root complex, same NUMA node
    model, nearest = machine.findings()[f"gpu {GPU}"]
    assert model.text == "NVIDIA H200, driver 550.54.14"
    assert nearest.text == (
        "nearest RDMA device: mlx5_0 (same PCIe switch); "
        "others: mlx5_1 same PCIe root complex, mlx5_2 same NUMA node"
    )


def test_a_nic_of_another_socket_is_called_that(machine: Machine) -> None:
    machine.gpu("pci0000:3a/0000:3a:00.0", numa=1)
    machine.nic("mlx5_2", "pci0000:5d/0000:5d:00.0", "0000:5e:00.0")
    assert machine.findings()[f"gpu {GPU}"][1].text == "nearest RDMA device: mlx5_2 (another NUMA node)"
