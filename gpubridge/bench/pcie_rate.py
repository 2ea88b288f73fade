"""Traffic of a PCIe link."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PcieRate:
    """Bytes per second over PCIe, as the GPU sees them: ``received`` from the host, ``sent`` to it."""

    received: float
    sent: float

    def above(self, idle: PcieRate) -> PcieRate:
        """Return what is more than when nothing happens."""
        received, sent = self.received - idle.received, self.sent - idle.sent
        return PcieRate(max(0.0, received), max(0.0, sent))
