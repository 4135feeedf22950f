"""Devices and links, as numbers that the cost model reads: peak rates, never measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..config import parse_bytes
from ..errors import ConfigError
from ..near import did_you_mean, read_toml

_GIB = 2**30


@dataclass(frozen=True)
class DeviceSpec:
    """One device.

    Attributes:
        name: how reports call it.
        flops: peak dense floating-point operations per second, by dtype; a dtype that is not listed
            counts as `torch.float32`.
        memory_bandwidth: bytes per second.
        memory_bytes: size of its memory.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    memory_bandwidth: float
    memory_bytes: int

    def __post_init__(self) -> None:
        rates = [*self.flops.values(), self.memory_bandwidth, float(self.memory_bytes)]
        if torch.float32 not in self.flops or not all(math.isfinite(r) and r > 0 for r in rates):
            raise ConfigError(
                f"DeviceSpec {self.name!r}: flops must name torch.float32, and flops, "
                f"memory_bandwidth and memory_bytes must be finite and above zero; got "
                f"flops={dict(self.flops)}, memory_bandwidth={self.memory_bandwidth}, "
                f"memory_bytes={self.memory_bytes}"
            )

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """One device from a TOML file with the names of this class; `name` may be left out::

            memory_bytes = "24 GiB"
            memory_bandwidth = 300e9
            flops = {float32 = 30e12, bfloat16 = 121e12}

        Raises:
            ConfigError: the file cannot be read, a name is unknown or missing, or a value is out of
                range; the message begins with the path.
        """
        given = {"name": Path(path).stem, **read_toml(path)}
        names = [f.name for f in fields(cls)]
        try:
            for name in given:
                if name not in names:
                    raise ConfigError(
                        f"a device has no {name!r}{did_you_mean(name, names) or '.'} It has "
                        f"{', '.join(names)}"
                    )
            if missing := [n for n in names if n not in given]:
                raise ConfigError(f"{', '.join(missing)} of the device missing")
            flops, size = given["flops"], given["memory_bytes"]
            if not isinstance(flops, dict) or not all(_is_number(x) for x in flops.values()):
                raise ConfigError(f"flops={flops!r}: give a number by dtype, {{float32 = 30e12}}")
            if not _is_number(given["memory_bandwidth"]):
                raise ConfigError(
                    f"memory_bandwidth={given['memory_bandwidth']!r}: give bytes per second, 300e9"
                )
            size = parse_bytes(size, name="memory_bytes", round_down=True)
            rates = {_dtype(name): float(rate) for name, rate in flops.items()}
            return cls(str(given["name"]), rates, float(given["memory_bandwidth"]), size)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def flops_of(self, dtype: torch.dtype) -> float:
        """Peak operations per second in `dtype`."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = [n for n, x in vars(torch).items() if isinstance(x, torch.dtype)]
        raise ConfigError(f"flops: {name!r} is no dtype{did_you_mean(name, known)}")
    return found


def _gpu(name: str, half: float, single: float, bandwidth: float, gib: int) -> DeviceSpec:
    flops = {torch.bfloat16: half, torch.float16: half, torch.float32: single}
    return DeviceSpec(name, flops, bandwidth, gib * _GIB)


# dense peaks of the vendor's data sheets (SXM parts); float32 without TF32
DEVICES: Mapping[str, DeviceSpec] = {
    "A100": _gpu("A100", 312e12, 19.5e12, 2.039e12, 80),
    "H100": _gpu("H100", 989e12, 67e12, 3.35e12, 80),
    "H200": _gpu("H200", 989e12, 67e12, 4.8e12, 141),
    "B200": _gpu("B200", 2250e12, 75e12, 8e12, 180),
    "cpu": _gpu("cpu", 1e12, 1e12, 1e11, 64),
}


def find_device(name: object) -> DeviceSpec:
    """The described device of that name, or of a TOML file: ``"H100"``, ``"L4.toml"``.

    Raises:
        ConfigError: no device of that name is known, or the file does not describe one.
    """
    if isinstance(name, DeviceSpec):
        return name
    if str(name).endswith(".toml"):
        return DeviceSpec.from_toml(str(name))
    found = {key.lower(): spec for key, spec in DEVICES.items()}.get(str(name).lower())
    if found is None:
        raise ConfigError(
            f"unknown device {name!r}: known are {', '.join(DEVICES)}"
            f"{did_you_mean(name, DEVICES) or '.'} Describe another one in a TOML file and give its path in place of the name: "
            'memory_bytes = "24 GiB", memory_bandwidth = 300e9, '
            "flops = {float32 = 30e12, bfloat16 = 121e12}; or in Python: "
            "DeviceSpec('L4', flops={torch.bfloat16: 121e12, torch.float32: 30e12}, "
            "memory_bandwidth=300e9, memory_bytes=24 * 2**30)"
        )
    return found


def described_gpu(name: str) -> DeviceSpec:
    """The described device that a vendor's name is of: ``"NVIDIA H100 80GB HBM3"`` is an H100.

    Raises:
        ConfigError: none of its words is the name of a described device.
    """
    words = re.split(r"[^A-Za-z0-9]+", name)
    return find_device(next((known for known in DEVICES if known in words), name))


@dataclass(frozen=True, slots=True)
class Link:
    """One mesh axis: devices along it, bytes per second that one sends, seconds of a collective."""

    size: int
    bandwidth: float
    latency_s: float


@dataclass(frozen=True)
class Topology:
    """The links, one number per mesh axis.

    Attributes:
        link_bandwidth: bytes per second that one device sends along the axis.
        latency_s: seconds that a collective over the axis takes however small it is.
    """

    link_bandwidth: tuple[float, ...]
    latency_s: tuple[float, ...]

    def __post_init__(self) -> None:
        good = all(math.isfinite(b) and b > 0 for b in self.link_bandwidth)
        good = good and all(math.isfinite(t) and t >= 0 for t in self.latency_s)
        if not good or len(self.link_bandwidth) != len(self.latency_s):
            raise ConfigError(
                "Topology: one link_bandwidth above zero and one latency_s of at least zero per mesh "
                f"axis; got link_bandwidth={self.link_bandwidth}, latency_s={self.latency_s}"
            )

    @classmethod
    def from_mesh_shape(cls, shape: tuple[int, ...], devices_per_node: int = 8) -> Topology:
        """NVLink where an axis stays within a node, the network where it leaves it.

        The last axis is the innermost: an axis stays within a node as long as the product of its
        size and of all sizes after it is at most `devices_per_node`.
        """
        bandwidth, latency, span = [], [], 1
        for size in reversed(shape):
            span *= size
            inside = span <= devices_per_node
            bandwidth.append(400e9 if inside else 45e9)
            latency.append(8e-6 if inside else 20e-6)
        return cls(tuple(reversed(bandwidth)), tuple(reversed(latency)))

    def links(self, mesh: DeviceMesh) -> Mapping[str, Link]:
        """The links by name of the mesh axis."""
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        each = zip(mesh.shape, self.link_bandwidth, self.latency_s, strict=True)
        return {name: Link(*link) for name, link in zip(names, each, strict=True)}
