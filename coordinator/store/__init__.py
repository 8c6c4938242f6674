"""Keys by prefix, a torch `Store` over them, locks, one rank before the others."""
