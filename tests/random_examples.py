"""Number of random examples of each property, by profiles of hypothesis."""

from hypothesis import HealthCheck, settings

__all__ = ["choose_profile"]

# No test asserts elapsed time: examples may take as long as a busy machine makes them. They are new ones
# each time: what few of them do not find, ./dev test --all finds, or another run.
settings.register_profile(
    "usual",
    deadline=None,
    max_examples=16,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("deep", settings.get_profile("usual"), max_examples=200)
settings.register_profile("fast", settings.get_profile("usual"), max_examples=10)


def choose_profile(config) -> None:
    """Load the profile that ``--hypothesis-profile`` names, or else that of ``--fast`` or the usual one."""
    chosen = config.getoption("--hypothesis-profile")
    settings.load_profile(chosen or ("fast" if config.getoption("--fast") else "usual"))
