"""FP8 as we use it: e4m3, 4 significant bits from 2^-6 to 448 (Micikevicius et al. 2022, arXiv:2209.05433)."""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # torch.finfo(FP8).max
# From here on converting to and from e4m3 is an instruction (PTX ISA, cvt).
FP8_CAPABILITY = 89
