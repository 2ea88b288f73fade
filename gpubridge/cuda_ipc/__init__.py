"""Device memory between processes. So far: what GPUs this machine has, or why none can be used."""

from gpubridge.cuda_ipc.probe import DeviceProbe, probe_devices

__all__ = ["DeviceProbe", "probe_devices"]
