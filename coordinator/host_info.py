"""The addresses of this host as the Coordinator sees them, for `python -m launcher doctor`.

python -m coordinator.host_info
"""

from __future__ import annotations

import json
import socket

from coordinator import addresses


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface, those for one link only left out."""
    found = {
        name: [text] if (text := addresses._ipv4_of(name)) else []
        for _, name in socket.if_nameindex()
    }
    for name, text in addresses._ipv6():
        found.setdefault(name, []).append(text)
    return found


def facts() -> dict[str, object]:
    """outward: by which addresses other hosts would reach this one, the first choice first."""
    outward = [text for _, text in addresses.outward_addresses()]
    return {"interfaces": interfaces(), "outward": outward}


if __name__ == "__main__":
    print(json.dumps(facts()))
