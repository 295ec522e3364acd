"""Matrix multiplications with unquantized weights: GEMV, split-K GEMM, and the library's GEMM for other sizes."""
