"""Kills at any moment of a save leave exactly the old checkpoint or exactly the new one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from killed_saves import BASED_MOMENTS, MOMENTS
from kills import BasedCampaign, Campaign
from syscalls import can_stop

needs_stops = pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here")


@pytest.mark.timeout(300)
def test_a_few_kills_find_the_old_checkpoint_or_the_new(
    tmp_path: Path, seed: int, full: bool
) -> None:
    campaign = Campaign(tmp_path, seed)
    kills = 20 if full else 4
    campaign.run(kills)
    assert not campaign.breaches, campaign.report()
    assert campaign.tally.total() == kills


@needs_stops
@pytest.mark.timeout(120)
def test_kills_around_the_commit_are_told_apart(tmp_path: Path, seed: int) -> None:
    campaign = Campaign(tmp_path, seed, victims="all")
    campaign.run(4, ["remove data", "commit", "sync folder of commit", "remove index"])
    assert not campaign.breaches, campaign.report()
    assert campaign.tally["commit", "new"] == 0
    for after in ("sync folder of commit", "remove index", "remove data"):
        assert campaign.tally[after, "new"] == 1, campaign.report()


@needs_stops
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_campaign_notices_a_writer_that_removes_the_old_checkpoint_first(
    tmp_path: Path, seed: int
) -> None:
    campaign = Campaign(tmp_path, seed, writer="careless", victims="all")
    campaign.run(6, ["remove data", "commit"])
    # Three kills are at the commit; some of them when there was nothing to lose.
    assert 1 <= len(campaign.breaches) <= 3, campaign.report()
    assert all("None" in breach for breach in campaign.breaches)


def run_200(campaign: Campaign, moments: Iterable[str]) -> None:
    """Kills 200 times: without a breach, with every outcome, and at all of these moments."""
    campaign.run(200)
    print(campaign.report())
    assert not campaign.breaches, campaign.report()
    assert {outcome for _, outcome in campaign.tally} == {"nothing", "old", "new"}
    if can_stop():
        assert set(moments) <= {where for where, _ in campaign.tally}, campaign.report()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_kills_find_the_old_checkpoint_or_the_new(tmp_path: Path, seed: int) -> None:
    run_200(Campaign(tmp_path, seed), MOMENTS)


@pytest.mark.slow
@needs_stops
@pytest.mark.timeout(300)
def test_a_few_kills_leave_the_base_of_a_save_whole(tmp_path: Path, seed: int, full: bool) -> None:
    campaign = BasedCampaign(tmp_path, seed, victims="any" if full else "all")
    moments = ["link data", "create metadata", "commit", "remove data"]
    campaign.run(20 if full else 4, None if full else moments)
    assert not campaign.breaches, campaign.report()
    assert full or campaign.tally["link data", "new"] == 0, campaign.report()


@needs_stops
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_campaign_notices_a_writer_that_moves_files_out_of_the_base(
    tmp_path: Path, seed: int
) -> None:
    campaign = BasedCampaign(tmp_path, seed, writer="moving", victims="all")
    campaign.run(2, ["create metadata"])
    assert len(campaign.breaches) == 2, campaign.report()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_kills_leave_the_base_of_a_save_whole(tmp_path: Path, seed: int) -> None:
    run_200(BasedCampaign(tmp_path, seed), BASED_MOMENTS)
