"""The checks, one per file. A file has the check as a class, and its `probe`, which runs in a separate process.

Modules here import torch inside functions only, so that `meltcore certify` itself never loads it.
"""
