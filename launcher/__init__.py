"""Start ranks, and tell each who it is."""

from launcher.info import LaunchInfo, LaunchInfoError

__all__ = ["LaunchInfo", "LaunchInfoError"]
