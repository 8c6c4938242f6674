"""Timings that depend on each other."""

from launcher.timings import TIMINGS, Timings


def test_timings_that_contain_others_are_longer():
    times = TIMINGS
    assert times.reap_lag_s < times.failure_grace_s < times.stop_grace_s
    assert times.reap_poll_s < times.orphan_grace_s < times.unkillable_s
    assert times.backend_grace_s + times.unkillable_s < times.reaper_exit_s
    assert times.stop_grace_s < times.longest_poll_s < times.longest_timeout_s


def test_scaled_multiplies_every_time():
    assert Timings(stop_grace_s=8).scaled(0.25).stop_grace_s == 2
    assert Timings().scaled(0.5).reap_lag_s == TIMINGS.reap_lag_s / 2
