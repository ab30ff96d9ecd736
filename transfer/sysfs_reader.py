"""Network interfaces, NUMA nodes and PCI positions, and interface traffic, from Linux's sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from transfer.node_agent import Reading

# InfiniBand's data counters count 32-bit words.
_BYTES_PER_WORD = 4
_ETHERNET = "1"


@dataclass(frozen=True, slots=True)
class RdmaNic:
    """An active port of an RDMA interface.

    Attributes:
        name: of the device, such as `mlx5_0`.
        port: its number.
        bandwidth: GB/s in one direction.
        pci_bus_id: such as `0000:0c:00.0`; empty where there is none.
        numa_node: 0 where the machine does not say.
    """

    name: str
    port: int
    bandwidth: float
    pci_bus_id: str
    numa_node: int


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """An Ethernet interface that is up.

    Attributes:
        name: such as `eth0`.
        bandwidth: GB/s in one direction; None where the driver does not say.
        numa_node: 0 where the machine does not say.
    """

    name: str
    bandwidth: float | None
    numa_node: int


class SysfsReader:
    """Reads below `root`; a folder or file that is missing is something the machine has not got."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._root = root

    def numa_nodes(self) -> list[int]:
        """Numbers of the NUMA nodes; [0] where the machine does not say."""
        folder = self._root / "devices" / "system" / "node"
        found = [int(p.name[4:]) for p in folder.glob("node*") if p.name[4:].isdigit()]
        return sorted(found) or [0]

    def pci_numa_node(self, pci_bus_id: str) -> int:
        return self._numa_node(self._pci(pci_bus_id))

    def pci_ancestors(self, pci_bus_id: str) -> tuple[str, ...]:
        """Host bridge, then bridges and switch ports, down to the parent; empty if unknown."""
        device = self._pci(pci_bus_id)
        if not device.exists():
            return ()
        parts = device.resolve().parts
        start = next((i for i, part in enumerate(parts) if part.startswith("pci0")), len(parts))
        return parts[start:-1]

    def rdma_nics(self) -> list[RdmaNic]:
        """Active ports, by name."""
        found = []
        for port in sorted(self._root.glob("class/infiniband/*/ports/*")):
            rate = re.match(r"([\d.]+) Gb/sec", self._read(port / "rate"))
            if "ACTIVE" not in self._read(port / "state") or rate is None:
                continue
            device = port.parents[1] / "device"
            bus_id = device.resolve().name if device.is_symlink() else ""
            found.append(
                RdmaNic(
                    name=port.parents[1].name,
                    port=int(port.name),
                    bandwidth=float(rate[1]) / 8,
                    pci_bus_id=bus_id,
                    numa_node=self._numa_node(device),
                )
            )
        return found

    def network_interfaces(self) -> list[NetworkInterface]:
        """Ethernet interfaces that are up and lead somewhere, by name.

        Left out are loopback, bridges and the like, and ports that `rdma_nics` reports. Purely
        virtual ones count only where nothing else is up, as in a container.
        """
        of_rdma = (
            {path.name for path in self._root.glob("class/infiniband/*/device/net/*")}
            if self.rdma_nics()
            else set()
        )
        physical: list[NetworkInterface] = []
        virtual: list[NetworkInterface] = []
        for folder in sorted((self._root / "class" / "net").glob("*")):
            up = self._read(folder / "operstate") == "up"
            if not up or self._read(folder / "type") != _ETHERNET or folder.name in of_rdma:
                continue
            if (folder / "bridge").exists() or (folder / "master").exists():
                continue
            megabits = self._read(folder / "speed")
            speed = int(megabits) / 8e3 if megabits.isdigit() and int(megabits) else None
            device = folder / "device"
            interface = NetworkInterface(folder.name, speed, self._numa_node(device))
            (physical if device.exists() else virtual).append(interface)
        return physical or virtual

    def read(self) -> Reading:
        """Traffic of every interface: `mlx5_0/1/tx`, `eth0/rx`, and so on."""
        counters: dict[str, int] = {}
        for port in self._root.glob("class/infiniband/*/ports/*"):
            for way, name in (("tx", "port_xmit_data"), ("rx", "port_rcv_data")):
                words = self._read(port / "counters" / name)
                if words.isdigit():
                    key = f"{port.parents[1].name}/{port.name}/{way}"
                    counters[key] = int(words) * _BYTES_PER_WORD
        for folder in (self._root / "class" / "net").glob("*"):
            for way in ("tx", "rx"):
                count = self._read(folder / "statistics" / f"{way}_bytes")
                if count.isdigit():
                    counters[f"{folder.name}/{way}"] = int(count)
        return Reading(counters)

    def _pci(self, pci_bus_id: str) -> Path:
        return self._root / "bus" / "pci" / "devices" / pci_bus_id

    def _numa_node(self, device: Path) -> int:
        text = self._read(device / "numa_node")
        return int(text) if text.isdigit() else 0

    def _read(self, path: Path) -> str:
        # Reading the speed of an interface that is down fails with EINVAL, not by absence.
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError:
            return ""
