"""`ifeval`: the instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911), one class for each of the 25 kinds."""
