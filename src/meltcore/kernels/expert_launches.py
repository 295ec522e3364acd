"""How products of routed experts are cut up on an H200, as found there; made by benchmarks/experts.py --tune.

By the shape of the weight, [experts, rows, columns] in 16 bits: from few pairs to many, the most pairs of a token and
an expert that a launch is for, all experts together, and the launch (`ExpertsLaunch`: pairs, rows, columns, stages,
warps). The last one is also for more.
"""

TABLE: dict[tuple[int, ...], tuple[tuple[int, tuple[int, int, int, int, int]], ...]] = {
    (257, 1024, 2048): (
        (18, (16, 64, 128, 6, 4)),
        (2304, (16, 128, 128, 4, 4)),
        (4608, (32, 64, 128, 3, 4)),
        (18432, (64, 128, 64, 3, 4)),
        (73728, (128, 256, 64, 4, 8)),
    ),
    (257, 2048, 512): (
        (144, (16, 64, 128, 3, 4)),
        (2304, (16, 128, 64, 3, 4)),
        (4608, (32, 128, 64, 3, 4)),
        (9216, (64, 128, 64, 3, 4)),
        (73728, (128, 256, 64, 4, 8)),
    ),
    (257, 128, 2048): (
        (144, (16, 64, 128, 6, 4)),
        (288, (16, 64, 64, 4, 4)),
        (576, (16, 64, 64, 3, 4)),
        (1152, (16, 128, 128, 3, 4)),
        (2304, (16, 128, 64, 3, 4)),
        (4608, (64, 128, 64, 4, 4)),
        (9216, (32, 128, 64, 4, 4)),
        (18432, (64, 128, 64, 4, 4)),
        (73728, (128, 128, 64, 3, 8)),
    ),
    (257, 2048, 64): (
        (18, (16, 128, 64, 3, 4)),
        (72, (16, 64, 64, 3, 4)),
        (2304, (16, 128, 64, 3, 4)),
        (9216, (32, 128, 64, 3, 4)),
        (73728, (64, 128, 64, 3, 4)),
    ),
}
