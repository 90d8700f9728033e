"""What hypothesis draws: the same examples on every run and every machine, so that no run fails by chance.

New ones are for who looks for faults: `./run test --hypothesis-profile explore`. What it finds becomes a test.
"""

from hypothesis import HealthCheck, settings

# Time is no property of an example: a busy machine must not fail one.
_TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("explore", _TIMELESS)
settings.register_profile("steady", _TIMELESS, derandomize=True)
settings.load_profile("steady")
