"""A machine out of `tests/fixtures`: what NVML's functions answer, and a sysfs tree."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from transfer.nvml_reader import NvmlReader
from transfer.sysfs_reader import SysfsReader

FIXTURES = Path(__file__).parent / "fixtures"


class FakeNvml:
    """The functions of `pynvml` that the reader calls. Tests set `lost` and `traffic_kib`."""

    NVML_SUCCESS = 0
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: list[dict[str, Any]]) -> None:
        self.gpus = gpus
        self.lost: set[int] = set()
        self.traffic_kib: dict[tuple[int, int, int], int] = {}
        self.counts_pcie = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return str(self.gpus[handle]["model"])

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        # Older bindings answer bytes.
        return SimpleNamespace(busId=self.gpus[handle]["bus_id"].encode())

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return int(self.gpus[handle]["pcie"][0])

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return int(self.gpus[handle]["pcie"][1])

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        gpu = self.gpus[handle]
        if "switch_links" not in gpu and "peers" not in gpu:
            raise self.NVMLError("Not Supported")
        return int(link < gpu.get("switch_links", 0) or link < len(gpu.get("peers", ())))

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return int(self.gpus[handle]["version"])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if "switch_links" in self.gpus[handle] else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return self.nvmlDeviceGetPciInfo(self.gpus[handle]["peers"][link])

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        return [self._field(handle, *field) for field in fields]

    def nvmlDeviceGetPcieThroughput(self, handle: int, kind: int) -> int:
        return 5_000_000 if kind == self.NVML_PCIE_UTIL_TX_BYTES else 0

    def _field(self, handle: int, field: int, scope: int) -> Any:
        failed = field >= self.NVML_FI_DEV_PCIE_COUNT_TX_BYTES and not self.counts_pcie
        amount = self.traffic_kib.get((handle, field, scope), 0)
        return SimpleNamespace(nvmlReturn=int(failed), value=SimpleNamespace(ullVal=amount))


class RecordedMachine:
    """`nvml` and `sysfs` of one fixture; `fake` and `root` are what they read."""

    def __init__(self, name: str, root: Path) -> None:
        recorded = yaml.safe_load((FIXTURES / f"{name}.yaml").read_text(encoding="utf-8"))
        self.root = root
        self.fake = FakeNvml(recorded["gpus"])
        self.nvml = NvmlReader(self.fake)
        self.sysfs = SysfsReader(root)
        self._pci: dict[str, Path] = {}
        (root / "devices/system/node").mkdir(parents=True)
        for number in recorded["numa_nodes"]:
            (root / f"devices/system/node/node{number}").mkdir()
        for bus_id, device in recorded["pci"].items():
            self._add_pci(bus_id, device)
        for nic, port in recorded["infiniband"].items():
            self._add_infiniband(nic, port)
        for interface, values in recorded["net"].items():
            self._add_interface(interface, values)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def _add_pci(self, bus_id: str, device: dict[str, Any]) -> None:
        folder = f"devices/{device['path']}/{bus_id}"
        self.write(f"{folder}/numa_node", device["numa"])
        link = self.root / "bus/pci/devices" / bus_id
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / folder)
        self._pci[bus_id] = self.root / folder

    def _add_infiniband(self, nic: str, port: dict[str, Any]) -> None:
        folder = f"class/infiniband/{nic}"
        for key in ("state", "rate"):
            self.write(f"{folder}/ports/1/{key}", port[key])
        for key in ("port_xmit_data", "port_rcv_data"):
            self.write(f"{folder}/ports/1/counters/{key}", 0)
        device = self._pci[port["pci"]]
        (self.root / folder / "device").symlink_to(device)
        if "netdev" in port:
            (device / "net" / port["netdev"]).mkdir(parents=True)

    def _add_interface(self, interface: str, values: dict[str, Any]) -> None:
        folder = f"class/net/{interface}"
        for key in ("operstate", "type", "speed"):
            if key in values:
                self.write(f"{folder}/{key}", values[key])
        for way in ("tx", "rx"):
            self.write(f"{folder}/statistics/{way}_bytes", 0)
        if values.get("bridge"):
            (self.root / folder / "bridge").mkdir()
        if "pci" in values:
            (self.root / folder / "device").symlink_to(self._pci[values["pci"]])
