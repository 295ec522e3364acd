"""Defines the messages between the processes of a server, sampling parameters and sockets. It does not import torch."""
