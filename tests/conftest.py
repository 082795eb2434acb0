"""One Hypothesis profile for all: the same examples in every run, and no clocks."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "jaxserve",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("jaxserve")
