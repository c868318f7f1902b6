"""Numbers of fla's kernels."""

RCP_LN2 = 1.4426950216  # 1 / ln(2) in fp32: from the natural logarithm to the one of base 2
