"""Timings of the model layer that depend on each other."""

from dataclasses import asdict

from drumline.timings import TIMINGS
from launcher.timings import TIMINGS as LAUNCHER


def test_a_server_ends_its_requests_before_a_backend_launcher_kills_it():
    """Answers had five seconds to end, as many as the launcher grants before it kills."""
    shutdown_s = TIMINGS.drain_s + TIMINGS.failure_poll_s + TIMINGS.notify_s
    assert LAUNCHER.backend_grace_s > shutdown_s


def test_scaled_timings_keep_their_ratios():
    halves = asdict(TIMINGS.scaled(0.5))
    assert halves == {name: seconds / 2 for name, seconds in asdict(TIMINGS).items()}
