"""Reductions over the ranks of a tensor-parallel group."""
