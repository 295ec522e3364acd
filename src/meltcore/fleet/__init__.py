"""Runs a server: plans the fleet, starts and supervises its processes, and keeps servers in the background."""
