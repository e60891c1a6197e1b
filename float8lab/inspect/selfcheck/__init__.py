"""Check every op on this machine, each against an independent definition of its result.

FP8 data and scales are compared bit for bit with the reference on the CPU, and casts also with the
definition of the formats. Results that depend on the order of a sum, or on an exponential, are
compared with float64 within a bound, which is derived next to the check. On a CPU the ops *are* the
reference, so a comparison with it shows only that the op runs and repeats its result. On a CPU only
formats, norms, GEMMs and attention are compared with something independent.

M rows, N rows of the other operand of a GEMM, K columns or contraction.

Sources: FP8 formats, arXiv:2209.05433; probabilistic bounds of rounding errors, Higham and Mary,
SIAM J. Sci. Comput. 41(5), 2019 (by Hoeffding's inequality).
"""

from float8lab.inspect.selfcheck.harness import Cases, Check, Report, Row
from float8lab.inspect.selfcheck.running import CHECKS, selfcheck

__all__ = ["CHECKS", "Cases", "Check", "Report", "Row", "selfcheck"]
