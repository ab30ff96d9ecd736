"""GPUs, their NVLinks and PCIe links, and the traffic on them, from NVIDIA's management library.

Needs the optional package `nvidia-ml-py` (`pip install flowkv-jax[nvml]`) and a driver; where one
is missing there is no reader. Nothing here touches CUDA or JAX. GPUs are named `gpu0`, `gpu1`, ...
in the library's order, which is that of their PCI bus ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transfer.node_agent import Reading

# GB/s in one direction, by what nvmlDeviceGetNvLinkVersion answers.
_NVLINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
# GB/s of one lane in one direction after line coding, by generation.
_PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_FALLBACK_NVLINK_GB_PER_S = 25.0
_FALLBACK_PCIE_GB_PER_S = 16.0


@dataclass(frozen=True, slots=True)
class NvLink:
    """One active NVLink of a GPU.

    Attributes:
        index: its number on the GPU.
        peer_pci_bus_id: of the GPU at the other end; None for a switch.
        bandwidth: GB/s in one direction.
    """

    index: int
    peer_pci_bus_id: str | None
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the library describes it.

    Attributes:
        index: its number.
        model: such as "NVIDIA L20".
        pci_bus_id: as sysfs spells it, `0000:07:00.0`.
        pcie_bandwidth: GB/s in one direction.
        nvlinks: those that are up.
    """

    index: int
    model: str
    pci_bus_id: str
    pcie_bandwidth: float
    nvlinks: tuple[NvLink, ...]

    @property
    def name(self) -> str:
        return f"gpu{self.index}"


class NvmlReader:
    """Reads through a module with `pynvml`'s functions, initialised by the caller.

    What a GPU or a driver does not support is left out; a GPU that is lost is left out until it
    answers again.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._known: list[Gpu] = []

    @staticmethod
    def open() -> NvmlReader | None:
        """This machine's reader; None without the package, the driver or permission."""
        try:
            import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return NvmlReader(pynvml)

    def gpus(self) -> list[Gpu]:
        """All GPUs that answer, by index."""
        count = self._ask("nvmlDeviceGetCount") or 0
        self._known = [gpu for gpu in map(self._gpu, range(count)) if gpu is not None]
        return list(self._known)

    def read(self) -> Reading:
        """Traffic of every GPU: `gpu0/nvlink3/tx`, `gpu0/pcie/rx`, and so on."""
        counters: dict[str, int] = {}
        rates: dict[str, float] = {}
        for gpu in self._known or self.gpus():
            handle = self._ask("nvmlDeviceGetHandleByIndex", gpu.index)
            if handle is not None:
                self._read_nvlinks(gpu, handle, counters)
                self._read_pcie(gpu, handle, counters, rates)
        return Reading(counters, rates)

    def _gpu(self, index: int) -> Gpu | None:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        pci = None if handle is None else self._ask("nvmlDeviceGetPciInfo", handle)
        if pci is None:
            return None
        generation = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        width = self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
        lane = _PCIE_LANE_GB_PER_S.get(generation or 0)
        pcie = lane * width if lane and width else _FALLBACK_PCIE_GB_PER_S
        links = [self._nvlink(handle, i) for i in range(self._nvml.NVML_NVLINK_MAX_LINKS)]
        return Gpu(
            index=index,
            model=_text(self._ask("nvmlDeviceGetName", handle) or "unknown"),
            pci_bus_id=sysfs_bus_id(pci.busId),
            pcie_bandwidth=pcie,
            nvlinks=tuple(link for link in links if link is not None),
        )

    def _nvlink(self, handle: Any, index: int) -> NvLink | None:
        if not self._ask("nvmlDeviceGetNvLinkState", handle, index):
            return None
        version = self._ask("nvmlDeviceGetNvLinkVersion", handle, index)
        kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, index)
        peer = None
        if kind == self._nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, index)
            if remote is None:
                return None
            peer = sysfs_bus_id(remote.busId)
        elif kind != self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return None
        bandwidth = _NVLINK_GB_PER_S.get(version or 0, _FALLBACK_NVLINK_GB_PER_S)
        return NvLink(index, peer, bandwidth)

    def _read_nvlinks(self, gpu: Gpu, handle: Any, counters: dict[str, int]) -> None:
        nvml = self._nvml
        wanted = [
            (f"{gpu.name}/nvlink{link.index}/{way}", (field, link.index))
            for link in gpu.nvlinks
            for way, field in (
                ("tx", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
                ("rx", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            )
        ]
        for name, kibibytes in self._fields(handle, wanted):
            counters[name] = kibibytes * 1024

    def _read_pcie(
        self, gpu: Gpu, handle: Any, counters: dict[str, int], rates: dict[str, float]
    ) -> None:
        nvml = self._nvml
        wanted = [
            (f"{gpu.name}/pcie/tx", (nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0)),
            (f"{gpu.name}/pcie/rx", (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0)),
        ]
        counted = dict(self._fields(handle, wanted))
        if counted:
            counters.update(counted)
            return
        # Older drivers count nothing and measure on request, for 20 ms a call.
        for way, kind in (
            ("tx", nvml.NVML_PCIE_UTIL_TX_BYTES),
            ("rx", nvml.NVML_PCIE_UTIL_RX_BYTES),
        ):
            kilobytes = self._ask("nvmlDeviceGetPcieThroughput", handle, kind)
            if kilobytes is not None:
                rates[f"{gpu.name}/pcie/{way}"] = kilobytes * 1e3

    def _fields(
        self, handle: Any, wanted: list[tuple[str, tuple[int, int]]]
    ) -> list[tuple[str, int]]:
        if not wanted:
            return []
        values = self._ask("nvmlDeviceGetFieldValues", handle, [field for _, field in wanted])
        return [
            (name, int(value.value.ullVal))
            for (name, _), value in zip(wanted, values or (), strict=False)
            if value.nvmlReturn == self._nvml.NVML_SUCCESS
        ]

    def _ask(self, function: str, *args: Any) -> Any:
        """What the library answers; None where it has no answer."""
        try:
            return getattr(self._nvml, function)(*args)
        except self._nvml.NVMLError:
            return None


def sysfs_bus_id(bus_id: str | bytes) -> str:
    """`00000000:07:00.0`, as NVML spells it, to `0000:07:00.0`, as sysfs does."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
