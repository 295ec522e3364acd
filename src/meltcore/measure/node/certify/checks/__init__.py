"""The checks, one per file: the plan as a class, and `probe`, which runs in a process of its own. `run.py` runs them.

Modules here import torch inside functions only, so that `meltcore certify` itself never loads it.
"""
