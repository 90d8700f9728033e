"""What no run may depend on: the environment's proxy, and chance.

Hypothesis draws the same examples on every run and every machine. New ones are for who looks for faults:
`./run test --hypothesis-profile explore`. What it finds becomes a test.
"""

import os

from hypothesis import HealthCheck, settings

os.environ["no_proxy"] = "localhost,127.0.0.1,::1"  # servers of the tests are here, whatever the environment's proxy

# Time is no property of an example: a busy machine must not fail one.
_TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("explore", _TIMELESS)
settings.register_profile("steady", _TIMELESS, derandomize=True)
settings.load_profile("steady")
