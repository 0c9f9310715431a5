"""Cost tables of any shape, for tests."""

from hypothesis import strategies as st

from meshspark.models.dspark.costs import CostTable


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    rows = [1, *sorted(draw(st.sets(st.integers(2, 40), max_size=8)))]
    times = st.lists(st.integers(1, 50) | st.integers(1, 10**9), min_size=len(rows), max_size=len(rows))
    return CostTable.measured(rows, draw(times))
