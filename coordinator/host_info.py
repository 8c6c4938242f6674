"""The addresses of this host as the Coordinator sees them, for `python -m launcher doctor`.

python -m coordinator.host_info
"""

from __future__ import annotations

import json
import socket

from coordinator import addresses


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface, without link-local ones."""
    by_name = {
        name: [text] if (text := addresses.ipv4_of(name)) else []
        for _, name in socket.if_nameindex()
    }
    for name, text in addresses.ipv6_addresses():
        by_name.setdefault(name, []).append(text)
    return by_name


def facts() -> dict[str, object]:
    """routable: addresses by which other hosts reach this one, the first choice first."""
    routable = [text for _, text in addresses.routable_addresses()]
    return {"interfaces": interfaces(), "routable": routable}


if __name__ == "__main__":
    print(json.dumps(facts()))
