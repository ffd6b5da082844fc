"""What all tests share: examples that Hypothesis draws may take their time, on a busy machine all the more."""

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
