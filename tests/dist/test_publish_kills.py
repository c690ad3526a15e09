"""Kills, damage and failures of stores leave each subscriber with exactly one version."""

from __future__ import annotations

from pathlib import Path

import pytest
from publish_kills import KINDS, STORE_KINDS, Campaign, store_campaign
from support.store_server import SeaweedFS

from torch_ckpt import Subscriber

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def run(campaign: Campaign, faults: int, kinds: list[str]) -> None:
    campaign.run(faults, kinds)
    assert not campaign.breaches, campaign.report()
    assert campaign.tally.total() == faults


@pytest.mark.slow
def test_a_few_faults_leave_each_subscriber_with_one_version(
    tmp_path: Path, seed: int, full: bool
) -> None:
    run(Campaign(tmp_path, seed), len(KINDS) * (8 if full else 1), KINDS)


@pytest.mark.slow
@pytest.mark.skipif(not SeaweedFS.is_installed(), reason=f"needs {SeaweedFS.INSTALLED_BY}")
def test_a_store_that_fails_leaves_each_subscriber_with_one_version(
    tmp_path: Path, seed: int
) -> None:
    with store_campaign(tmp_path, seed) as campaign:
        run(campaign, 12, STORE_KINDS)


def test_the_campaign_notices_a_subscriber_that_does_not_verify_its_tensors(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Subscriber, "_refusal", lambda *_: "")
    campaign = Campaign(tmp_path, seed)
    campaign.run(4, ["base"])
    assert campaign.breaches, campaign.report()
