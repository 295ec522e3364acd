"""Test doubles for Meltcore and its users: scripted GPUs, nodes and servers. No other package imports them."""
