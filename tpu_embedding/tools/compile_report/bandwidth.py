"""Converts traffic to modelled time: bytes over the peak bandwidths of a device."""

import dataclasses

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.tools.compile_report.traffic import Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost(Traffic):
    """Modelled bytes that one device moves, and the minimum time they take.

    Attributes:
      hbm_seconds: `hbm_bytes` over the peak bandwidth, or None if it is unknown.
      ici_seconds: `ici_bytes` over the peak bandwidth of all links of the chip, or None
        if it is unknown.
      dcn_seconds: `dcn_bytes` over the peak bandwidth, or None if it is unknown.
    """

    hbm_seconds: float | None
    ici_seconds: float | None
    dcn_seconds: float | None


def cost_of(traffic: Traffic, hardware: HardwareInfo) -> Cost:
    """Returns the traffic of one device with the time it takes.

    Args:
      traffic: traffic of one device.
      hardware: hardware of the device. Devices on one chip share its bandwidth evenly.

    Example:
      >>> from tpu_embedding.hardware import HardwareInfo
      >>> hardware = HardwareInfo(name="a", hbm_bytes_per_second=1e12)
      >>> cost = cost_of(Traffic(hbm_bytes=2e9), hardware)
      >>> cost.hbm_seconds, cost.ici_seconds
      (0.002, None)
    """

    def seconds(num_bytes: float, bytes_per_second: float | None) -> float | None:
        if bytes_per_second is None:
            return None
        return num_bytes * hardware.devices_per_chip / bytes_per_second

    return Cost(
        **dataclasses.asdict(traffic),
        hbm_seconds=seconds(traffic.hbm_bytes, hardware.hbm_bytes_per_second),
        ici_seconds=seconds(traffic.ici_bytes, hardware.ici_bytes_per_second),
        dcn_seconds=seconds(traffic.dcn_bytes, hardware.dcn_bytes_per_second),
    )
