import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podium.utils.dataset_order import MixtureLoader
from podium.utils.errors import UserError


def mixture(lengths, weights, batch=8, seed=0, shuffle=True):
    ends = np.cumsum(lengths)
    sources = [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    return MixtureLoader(sources, weights, batch, seed, shuffle)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 5)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_each_source_gives_its_share_in_orders_of_its_own(sources, batch, batches):
    lengths, weights = zip(*sources, strict=True)
    loader = mixture(lengths, weights, batch)
    drawn = np.concatenate([next(loader)[1] for _ in range(batches)])
    starts = np.cumsum((0, *lengths))
    for source, (length, weight) in enumerate(sources):
        mine = drawn[(drawn >= starts[source]) & (drawn < starts[source + 1])]
        assert abs(len(mine) - weight / sum(weights) * len(drawn)) <= len(sources)
        counts = np.bincount(mine - starts[source], minlength=length)
        assert counts.max(initial=0) - counts.min() <= 1, "no row a second time before all were there once"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10), st.booleans())
def test_a_position_is_exact(steps, shuffle):
    loader = mixture((5, 11), (1, 2), shuffle=shuffle)
    for _ in range(steps):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = mixture((5, 11), (1, 2), shuffle=shuffle)
    resumed.load_state_dict(state)
    for _ in range(3):
        (epoch, rows), (other_epoch, other_rows) = next(loader), next(resumed)
        assert epoch == other_epoch and rows.tolist() == other_rows.tolist()


def test_other_sources_are_refused():
    state = mixture((5, 11), (1, 2)).state_dict()
    for changed in (mixture((5, 12), (1, 2)), mixture((5, 11), (1, 1)), mixture((5, 11), (1, 2), seed=1)):
        with pytest.raises(UserError, match="cannot resume the data order"):
            changed.load_state_dict(state)
    for weights in ((1,), (1, 0), (1, float("nan"))):
        with pytest.raises(UserError, match=r"expected a number above 0 for each of the 2 entries"):
            mixture((5, 11), weights)
    with pytest.raises(UserError, match=r"entry 1 of data.train_files has no rows left"):
        mixture((5, 0), (1, 1))
