"""Settings of image_preproc as parameters make them, without tensors in the configuration."""

from gpubridge.backends.image_preproc.settings import Settings
from gpubridge.backends.model_setup import ModelSetup

__all__ = ["image_settings"]


def image_settings(**values: str) -> Settings:
    entries = {key: {"string_value": value} for key, value in values.items()}
    config = {"name": "m", "backend": "image_preproc", "max_batch_size": 1, "parameters": entries}
    return Settings.from_setup(ModelSetup.from_config(config))
