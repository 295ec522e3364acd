"""Computes, formats and judges the values of result documents."""
