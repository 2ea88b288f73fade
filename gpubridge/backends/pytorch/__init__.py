"""TorchScript modules and exported programs, run by PyTorch."""
