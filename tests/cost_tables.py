"""Cost tables of any shape, for tests."""

from hypothesis import strategies as st

from meshspark.models.dspark.costs import CostTable

RECORDED = CostTable(
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192,
     224, 256, 320, 384),
    tuple(1000 * us for us in (
        16027, 19269, 19269, 19383, 19901, 20142, 20142, 20142, 25437, 25437, 26322, 26322, 26322, 29824,
        33448, 35577, 54784, 56605, 56605, 59746, 67141, 67141, 92116, 100083, 121984, 121984, 126802,
        133193, 152103, 158585)),
)  # fmt: skip
"""Of the bundled sample in float32 on one rank and thread, as `bench speculative --case widths` had it for 64 requests
on a 2-core reference machine."""


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    rows = [1, *sorted(draw(st.sets(st.integers(2, 40), max_size=8)))]
    times = st.lists(st.integers(1, 50) | st.integers(1, 10**9), min_size=len(rows), max_size=len(rows))
    return CostTable.measured(rows, draw(times))
