"""The checks, one per file: the plan as a class, and `probe`, which runs in a separate process for `run.py`.

Modules here import torch inside functions only, so that `meltcore certify` itself never loads it.
"""
