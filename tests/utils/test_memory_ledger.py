"""Peaks of host memory by kind of call."""

import torch

from podium.utils.device import memory_used
from podium.utils.memory_ledger import MemoryLedger


def test_a_peak_belongs_to_its_call():
    ledger, before = MemoryLedger(), memory_used()["rss_gb"]
    with ledger("actor", "update_actor"):
        del_me = torch.ones(300_000_000, dtype=torch.uint8)
        del del_me
    with ledger("actor", "compute_log_prob"):
        pass
    with ledger("rollout", "generate_sequences"):
        pass
    peaks = ledger.pop("actor")
    assert set(peaks) == {"update_actor/peak_rss_gb", "compute_log_prob/peak_rss_gb"}
    assert before + 0.25 < peaks["update_actor/peak_rss_gb"] < before + 0.5
    assert peaks["compute_log_prob/peak_rss_gb"] < before + 0.1
    assert ledger.pop("actor") == {} and set(ledger.pop("rollout")) == {"generate_sequences/peak_rss_gb"}


def test_the_largest_of_several_calls_and_of_one_that_fails():
    ledger = MemoryLedger()
    try:
        with ledger("actor", "update_actor"):
            torch.ones(300_000_000, dtype=torch.uint8)
            raise ValueError
    except ValueError:
        pass
    with ledger("actor", "update_actor"):
        pass
    assert ledger.pop("actor")["update_actor/peak_rss_gb"] > memory_used()["rss_gb"] + 0.2
