"""Doors: what puts specplug's plugins behind other servers. Each imports its server only when it is used."""
